// What the server does now, asked for every other second while somebody sees the page.
import { at, list, table, tell } from "./dom.js";
import { between, guesses, number, percent, sourceRows } from "./figures.js";

const EVERY_MS = 2000;
const READINGS = 30; // a minute of them

export class Live {
  // `onReady()` is called with a server that is ready, until it has succeeded once.
  constructor(server, onReady) {
    Object.assign(this, { server, onReady, looking: false, known: false, readings: [] });
  }

  start() {
    document.addEventListener("visibilitychange", () => this.look());
    setInterval(() => this.look(), EVERY_MS);
    return this.look();
  }

  async look() {
    if (this.server.locked || this.looking || document.visibilityState !== "visible") return;
    this.looking = true;
    try {
      const stats = await this.server.read("stats");
      this.show(stats);
      if (stats.state === "ready" && !this.known) {
        await this.onReady();
        this.known = true;
      }
      tell(at("about"), stats.model + (stats.state === "ready" ? "" : `: the engine is ${stats.state}`));
    } catch (error) {
      tell(at("about"), "The server's state is not known. " + error.message, "wrong");
    }
    this.looking = false;
  }

  show(stats) {
    const { speculation } = stats;
    list(at("live"), [
      ["running", String(stats.num_running)],
      ["waiting", String(stats.num_waiting)],
      ["tokens/s", number(stats.tokens.generated_per_s, 1)],
      ["tokens a step", number(speculation.recent_tokens_per_step, 2)],
      ["drafts accepted", percent(guesses(speculation.num_draft_tokens, speculation.num_accepted_tokens, speculation.sources).rate)],
      ["KV cache in use", percent(stats.kv_cache.usage)],
      ...(stats.replicas ?? []).map((each, index) => ["replica " + index,
        each.state === "ready" ? `${each.num_running} running, ${each.num_waiting} waiting` : each.state]),
    ]);
    this.readings.push(speculation.sources);
    if (this.readings.length > READINGS) this.readings.shift();
    const recent = sourceRows(between(this.readings[0], speculation.sources));
    const rows = sourceRows(speculation.sources).map((row, index) => [...row, recent[index][2] + " of " + recent[index][1]]);
    at("live-sources").hidden = !rows.length;
    const shown = table("Draft tokens by source, of all answers that have ended", ["source", "drafted", "accepted", "rate", "last minute"], rows);
    if (at("live-table").textContent !== shown.textContent) at("live-table").replaceChildren(shown); // keeps the focus
  }
}
