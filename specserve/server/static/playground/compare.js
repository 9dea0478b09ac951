// The same request with drafts and without.
import { make, table, tell } from "./dom.js";
import { difference, spread, verdict } from "./figures.js";
import { emptyAnswer, take } from "./server.js";

export const ROUNDS = 5;

// With drafts and without in turns, and in turns also who goes first, so that what else the machine does meets both.
// Each run has a salt of its own, so that none finds a prompt or an answer to draft from that another has left; under
// that salt one token is asked for first, so that each run, with drafts or without, finds its prompt in the prefix cache.
export async function compare(server, body, answer, { said, place }, signal) {
  const { drafter } = body.speculative || {};
  const asked = {
    drafts: { ...body, speculative: drafter ? { drafter } : undefined },
    plain: { ...body, speculative: { drafter: "none" }, prediction: undefined },
  };
  const runs = { drafts: [], plain: [] };
  const texts = { drafts: answer, plain: null };
  place.replaceChildren();
  for (let turn = 0; turn < 2 * ROUNDS; turn++) {
    const kind = turn % 4 === 0 || turn % 4 === 3 ? "drafts" : "plain";
    const told = ({ tokens }) => tell(said, `run ${turn + 1} of ${2 * ROUNDS}: ${tokens} tokens ...`);
    const salt = "compare " + Math.random().toString(36).slice(2) + Math.random().toString(36).slice(2);
    const request = { ...asked[kind], cache_salt: salt };
    told(emptyAnswer());
    await whole(server, { ...request, max_tokens: 1 }, signal, () => {});
    const again = await whole(server, request, signal, told);
    runs[kind].push(again.metrics);
    texts[kind] = again;
    if (outputOf(again) !== outputOf(answer)) {
      tell(said, `The texts differ from character ${difference(outputOf(again), outputOf(answer))} on.`, "wrong");
      place.replaceChildren(shownTexts({ "First answer": answer, [`Run ${turn + 1}, ${NAMES[kind]}`]: again }));
      return;
    }
  }
  const speeds = Object.fromEntries(Object.entries(runs).map(([kind, all]) => [kind, all.map((run) => run.tokens_per_second)]));
  tell(said, "The texts are identical. " + verdict(speeds), "good");
  place.replaceChildren(figures(runs), shownTexts({ "With drafts": texts.drafts, "Without drafts": texts.plain }));
}

const NAMES = { drafts: "with drafts", plain: "without drafts" };

async function whole(server, body, signal, told) {
  const answer = emptyAnswer();
  for await (const event of server.chat(body, signal)) {
    take(answer, event);
    told(answer);
  }
  return answer;
}

// All that the model wrote.
const outputOf = ({ thought, text, calls }) => thought + text + calls.map((call) => call.function.name + call.function.arguments).join("");

const figures = (runs) => table(`Medians of ${ROUNDS} runs each, in turns, each with its prompt in the prefix cache (least to most)`,
  ["", "tokens/s", "first token, ms", "generated in, ms"],
  Object.entries(runs).map(([kind, all]) => [NAMES[kind], spread(all.map((run) => run.tokens_per_second), 1),
    spread(all.map((run) => run.time_to_first_token_ms), 0), spread(all.map((run) => run.generation_time_ms), 0)]));

const shownTexts = (texts) => make("details", {}, make("summary", {}, "Both texts"), make("div", { class: "both" },
  ...Object.entries(texts).map(([name, answer]) => make("div", {}, make("h3", {}, name),
    make("div", { class: "text plain", tabindex: "0", role: "group", "aria-label": name }, outputOf(answer))))));
