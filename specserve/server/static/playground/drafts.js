// Tokens marked by the step they came in, or by who proposed them.
import { at, make } from "./dom.js";

const sources = []; // who has proposed tokens that stand marked in the conversation

// The texts of a step: shaded where it had several tokens.
const step = (text, tokens) => (tokens < 2 ? text
  : make("span", { class: "step", "data-tokens": Math.min(tokens, 4), title: tokens + " tokens in one step" }, text));

export const marked = ({ text, tokens, explained }) => (explained ? drafted(text, explained) : [step(text, tokens)]);

// The texts of a step that was explained: whose each token is, and what was rejected before what came instead.
function drafted(text, { tokens, rejected }) {
  const parts = [];
  for (let place = 0; place <= tokens.length; place++) {
    for (const branch of rejected.filter(({ position }) => position === place)) {
      const said = branch.tokens.map((token) => token.text).join("").replaceAll("\n", "⏎");
      parts.push(make("s", { class: "rejected", title: "rejected, proposed by " + branch.tokens[0].sources.join(", ") }, said));
    }
    if (place < tokens.length && tokens[place].text) parts.push(proposed(tokens[place]));
  }
  const shown = tokens.map((token) => token.text).join("");
  return text.length > shown.length ? [...parts, text.slice(shown.length)] : parts; // what was held back until the end
}

function proposed({ text, sources: [source, ...others] }) {
  if (source === undefined) return text;
  if (!sources.includes(source)) {
    sources.push(source);
    at("sources-legend").replaceChildren("Draft tokens: ", ...sources.flatMap((name) => [colored(name, name), ", "]),
      make("s", { class: "rejected" }, "rejected"));
  }
  return colored(text, source, "proposed by " + [source, ...others].join(", "));
}

const colored = (text, source, title) => make("span", { class: "draft", title,
  "data-source": source === "jump_forward" ? source : sources.filter((name) => name !== "jump_forward").indexOf(source) % 4 }, text);

// Adds what a step says of its drafts to counts by source: { source: { num_draft_tokens, num_accepted_tokens } }.
export function count(counts, { tokens, proposed: all }) {
  const of = (name) => (counts[name] ??= { num_draft_tokens: 0, num_accepted_tokens: 0 });
  for (const [name, many] of Object.entries(all)) of(name).num_draft_tokens += many;
  for (const token of tokens) for (const name of token.sources) of(name).num_accepted_tokens++;
}
