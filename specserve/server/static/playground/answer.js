// How an answer is shown: as Markdown, or by its tokens; its reasoning, calls of tools and figures.
import { copyButton, follow, list, make, table } from "./dom.js";
import { count, marked } from "./drafts.js";
import { guesses, number, percent, sourceRows } from "./figures.js";
import { Markdown } from "./markdown.js";

export class AnswerView {
  constructor(model) {
    this.text = make("div", { class: "text markdown" });
    this.tokens = make("div", { class: "text tokens" });
    this.thoughts = make("div", { class: "thought" });
    this.thinking = make("details", { open: "", hidden: "" }, make("summary", {}, "Reasoning"), this.thoughts);
    this.calls = make("div", { class: "calls" });
    this.said = make("p", { class: "said", role: "status" });
    this.sources = make("div", { class: "by-source" });
    this.markdown = new Markdown(this.text);
    this.counts = {}; // of draft tokens by source, from steps that are explained
    this.element = make("article", { class: "answer", "aria-busy": "true" }, make("h2", {}, model),
      this.thinking, this.text, this.tokens, this.calls, this.sources, this.said);
  }

  // What has come of the whole, and the piece that came last.
  push(answer, piece) {
    if (!piece.text && !piece.thought && !piece.explained) return;
    follow(() => {
      this.thinking.hidden &&= !piece.thought;
      if (piece.thought) this.thoughts.append(piece.thought);
      else this.tokens.append(...marked(piece));
      if (piece.explained) this.showCounts(piece.explained);
    });
    if (piece.text) this.markdown.set(answer.text);
  }

  showCounts(explained) {
    count(this.counts, explained);
    if (Object.keys(this.counts).length) this.sources.replaceChildren(sourceTable(this.counts, "proposed", this.sources.firstChild?.open));
  }

  // A kept answer, without its tokens.
  show(turn) {
    this.thoughts.append(turn.reasoning_content || "");
    this.thinking.hidden = !turn.reasoning_content;
    this.thinking.open = false;
    this.markdown.text = turn.content;
    this.end(turn);
  }

  // `turn`: the whole answer, with the figures in its `about`.
  end(turn) {
    this.element.setAttribute("aria-busy", "false");
    this.element.classList.toggle("with-tokens", this.tokens.childNodes.length > 0);
    this.markdown.finish();
    const { figures = [], sources = {} } = turn.about || {};
    this.calls.replaceChildren(...(turn.tool_calls || []).map((call) => make("div", { class: "code" },
      make("div", { class: "row" }, make("span", {}, `calls ${call.function.name}`), copyButton(() => call.function.arguments, "Copy arguments")),
      make("pre", { tabindex: "0", role: "group", "aria-label": "Arguments" }, readable(call.function.arguments)))));
    this.sources.replaceChildren(...(Object.keys(sources).length ? [sourceTable(sources, "drafted", this.sources.firstChild?.open)] : []));
    const shown = make("dl", { "aria-label": "How it was generated" });
    list(shown, figures);
    this.said.before(shown);
    this.actions = make("div", { class: "row actions" }, copyButton(() => turn.content));
    this.said.before(this.actions);
  }
}

// `drafted`: what to call the tokens that were drafted; while an answer comes they are all that were proposed, of which
// some were left out before the model read them.
const sourceTable = (sources, drafted, open) => make("details", { open: open ? "" : undefined }, make("summary", {}, "Acceptance by source"),
  table("Draft tokens by source", ["source", drafted, "accepted", "rate"], sourceRows(sources)));

function readable(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // cut off
  }
}

// [name, value] of what the last event told of an answer.
export function figuresOf(body, answer, drafter) {
  const counted = answer.metrics.speculative_decoding;
  const drafts = counted && guesses(counted.num_draft_tokens, counted.num_accepted_draft_tokens, counted.by_source);
  return [
    ["tokens", String(answer.usage.completion_tokens)],
    ["first after", number(answer.metrics.time_to_first_token_ms, 0) + " ms"],
    ["tokens/s", number(answer.metrics.tokens_per_second, 1)],
    ["drafter", drafter],
    ...(drafts ? [
      ["drafted", String(drafts.drafted)],
      ["accepted", `${drafts.accepted} (${percent(drafts.rate)})`],
      ...(drafts.forced ? [["jump-forward", String(drafts.forced)]] : []),
      ["mean acceptance length", number(counted.mean_acceptance_length, 2)],
    ] : []),
    ["seed", String(body.seed)],
    ["ended by", answer.reason],
  ];
}
