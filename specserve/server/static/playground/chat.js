// The conversation on the page: what is sent, shown, stopped, repeated and changed.
import { AnswerView, figuresOf } from "./answer.js";
import { compare } from "./compare.js";
import { answerTurn, messagesOf, newConversation, openCalls, titleOf } from "./conversation.js";
import { at, button, copyButton, follow, make, tell } from "./dom.js";
import { buildRequest } from "./request.js";
import { emptyAnswer, take } from "./server.js";

export class Chat {
  // `fields()`: what buildRequest reads. `onChange()` is called when the conversation, or whether something runs, has
  // changed.
  constructor(server, store, fields, onChange) {
    Object.assign(this, { server, store, fields, onChange, drafter: null, running: null, shown: new WeakMap() });
    this.conversation = newConversation();
  }

  // --- what is shown

  // Each turn keeps its element as long as it is the same turn.
  render() {
    const { turns } = this.conversation;
    at("log").replaceChildren(...turns.map((turn) => {
      if (!this.shown.has(turn)) this.shown.set(turn, this.elementOf(turn));
      return this.shown.get(turn);
    }), ...this.resultForms());
    this.onChange();
  }

  elementOf(turn) {
    if (turn.role === "assistant") {
      const view = new AnswerView(turn.about?.model || "Assistant");
      view.show(turn);
      view.actions.append(this.retryButton(turn));
      return view.element;
    }
    const text = make("div", { class: "text plain" }, turn.content);
    const mine = turn.role === "user";
    const actions = make("div", { class: "row actions" }, copyButton(() => turn.content),
      ...(mine ? [button("Edit", () => this.edit(turn), { class: "small idle" })] : []));
    return make("article", { class: "mine" }, make("h2", {}, mine ? "You" : "Result of a tool"), text, actions);
  }

  // Where the results of the last answer's calls are written.
  resultForms() {
    const calls = openCalls(this.conversation.turns);
    if (!calls.length) return [];
    const fields = calls.map(({ id, function: { name } }, index) => [id, make("textarea", { id: "result-" + index, rows: "2" }), name]);
    const submit = (event) => {
      event.preventDefault();
      const results = fields.map(([id, field]) => ({ role: "tool", tool_call_id: id, content: field.value }));
      this.ask([...this.conversation.turns, ...results]);
    };
    return [make("form", { class: "mine results", submit }, ...fields.flatMap(([, field, name]) =>
      [make("label", { for: field.id }, `Result of ${name}`), field]), make("button", { class: "idle" }, "Send results"))];
  }

  retryButton(turn) {
    return button("Retry", () => {
      const { turns } = this.conversation;
      this.ask(turns.slice(0, turns.indexOf(turn)));
    }, { class: "small idle" });
  }

  // --- one thing at a time

  // Does `work(signal)`, with Stop in reach. How it went: "done", "stopped" or "failed"; `said` shows the last two.
  async run(said, work) {
    this.running = new AbortController();
    this.onChange();
    const { signal } = this.running;
    try {
      await work(signal);
      return "done";
    } catch (error) {
      tell(said, signal.aborted ? "Stopped." : error.message, signal.aborted ? "" : "wrong");
      return signal.aborted ? "stopped" : "failed";
    } finally {
      this.running = null;
      this.onChange();
    }
  }

  stop() {
    this.running?.abort();
  }

  // Asks for the answer to `turns`, which become the conversation once there is one; else it stays as it was. Returns
  // whether they did.
  async ask(turns) {
    if (this.running) return false;
    const before = this.conversation.turns;
    let body;
    try {
      body = buildRequest(this.fields(), messagesOf(turns));
    } catch (error) {
      this.complain(error.message);
      return false;
    }
    const view = new AnswerView(body.model);
    const answer = emptyAnswer();
    this.conversation.turns = turns;
    this.render();
    follow(() => at("log").append(view.element), true);
    const ended = await this.run(view.said, async (signal) => {
      for await (const event of this.server.chat(body, signal)) {
        for (const piece of take(answer, event)) view.push(answer, piece);
      }
    });
    if (ended === "done" || (ended === "stopped" && (answer.text || answer.thought))) {
      this.keep(body, answer, view, ended);
      return true;
    }
    this.giveUp(before, turns, view);
    return false;
  }

  keep(body, answer, view, ended) {
    const done = ended === "done";
    if (!done) answer.calls = []; // cut off
    const drafter = body.speculative?.drafter || this.drafter;
    const about = { model: body.model, figures: done ? figuresOf(body, answer, drafter) : [["ended by", "stop button"]],
      sources: done ? answer.metrics.speculative_decoding?.by_source : undefined };
    const turn = answerTurn(answer, about);
    follow(() => view.end(turn));
    view.actions.append(this.retryButton(turn));
    if (done && drafter !== "none") this.offerComparison(body, answer, view);
    this.shown.set(turn, view.element);
    this.conversation.turns = [...this.conversation.turns, turn];
    this.save();
    const forms = this.resultForms();
    follow(() => at("log").append(...forms));
    this.onChange();
  }

  // What failed is no part of the conversation; it stays in sight, with a button that sends it again.
  giveUp(before, turns, view) {
    view.markdown.finish();
    view.element.setAttribute("aria-busy", "false");
    view.element.classList.toggle("with-tokens", view.tokens.childNodes.length > 0);
    view.said.append(" Not part of the conversation; the message can be sent again.");
    view.element.append(make("div", { class: "row actions" }, button("Retry", () => this.ask(turns), { class: "small idle" })));
    const failed = turns.slice(before.length).map((turn) => this.shown.get(turn)).filter(Boolean);
    this.conversation.turns = before;
    this.render();
    follow(() => at("log").append(...failed, view.element), true);
    const last = turns.at(-1);
    if (last.role === "user" && !before.includes(last)) at("entry").value ||= last.content;
    this.onChange();
  }

  complain(text) {
    const said = make("p", { class: "said wrong", role: "alert" }, text);
    follow(() => at("log").append(said), true);
  }

  offerComparison(body, answer, view) {
    const [said, place] = [make("span", { class: "said", role: "status" }), make("div", { class: "comparison" })];
    const start = () => this.run(said, (signal) => compare(this.server, body, answer, { said, place }, signal));
    view.actions.append(button("Compare with drafting off", start, { class: "small idle compare" }), said);
    view.actions.after(place);
  }

  // --- changes

  async send(content) {
    if (this.running || !content.trim()) return;
    at("entry").value = "";
    await this.ask([...this.conversation.turns, { role: "user", content }]);
  }

  // A field in place of the message; what comes after it is asked for anew.
  edit(turn) {
    const shown = this.shown.get(turn);
    const field = make("textarea", { id: "edited", rows: "3", keydown: (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    } });
    field.value = turn.content;
    const close = () => {
      form.replaceWith(shown);
      at("entry").focus();
    };
    const submit = (event) => {
      event.preventDefault();
      const { turns } = this.conversation;
      if (this.running || !field.value.trim()) return;
      at("entry").focus();
      this.ask([...turns.slice(0, turns.indexOf(turn)), { role: "user", content: field.value }]);
    };
    const form = make("form", { class: "mine", submit }, make("label", { for: "edited" }, "Edit the message; what follows it is asked for again"),
      field, make("div", { class: "row" }, make("button", { class: "main idle" }, "Send"), button("Cancel", close)));
    document.getElementById("edited")?.closest("form").querySelector("[type=button]").click(); // one at a time
    shown.replaceWith(form);
    field.focus();
  }

  save() {
    const { conversation } = this;
    conversation.title = titleOf(conversation.turns);
    conversation.updated = new Date().toISOString();
    try {
      this.store.save(conversation);
    } catch (error) {
      this.complain(error.message);
    }
  }

  // Shows another conversation, or a new one.
  open(conversation = newConversation()) {
    if (this.running) return;
    this.conversation = conversation;
    this.render();
    at("entry").focus();
  }
}
