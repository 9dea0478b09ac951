// The server that this page came from: its JSON, its streams, its key.

export class Server {
  // `base`: where its paths begin. `onLocked()` is called when it wants another key than `key`.
  constructor(base, onLocked) {
    Object.assign(this, { base, onLocked, key: "", locked: false });
  }

  // Its response. Throws what it says of an error.
  async call(path, options = {}) {
    const headers = { ...options.headers, ...(this.key ? { Authorization: "Bearer " + this.key } : {}) };
    const response = await fetch(new URL(path, this.base), { ...options, headers });
    if (response.ok) return response;
    if (response.status === 401) {
      this.locked = true;
      this.onLocked();
    }
    throw new Error(errorIn(await response.text()) || response.status + " " + response.statusText);
  }

  async read(path) {
    return (await this.call(path)).json();
  }

  // The events of an answer, as objects. Throws when one tells an error, and when the end is missing.
  async *chat(body, signal) {
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal };
    const response = await this.call("v1/chat/completions", options);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
    throw new Error("The connection was closed before the answer ended.");
  }
}

function errorIn(body) {
  try {
    return JSON.parse(body).error.message;
  } catch {
    return ""; // not from this server: something between has answered
  }
}

// What follows `data:` of each event, as it comes. Neither events nor characters need to come in one piece.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

export const emptyAnswer = () => ({ text: "", thought: "", calls: [], tokens: 0, reason: null, metrics: null, usage: null });

// Adds an event to an answer. Returns what is to be shown of it: pieces { text, thought, tokens, explained }. What a
// model that reasons thinks comes before its answer.
export function take(answer, event) {
  if (event.metrics) Object.assign(answer, { metrics: event.metrics, usage: event.usage });
  return event.choices.map(({ delta, token_ids: ids, finish_reason: reason, explained }) => {
    const piece = { text: delta.content || "", thought: delta.reasoning_content || "", tokens: (ids || []).length, explained };
    answer.reason = reason || answer.reason;
    answer.text += piece.text;
    answer.thought += piece.thought;
    answer.tokens += piece.tokens;
    for (const call of delta.tool_calls || []) addCall(answer.calls, call);
    return piece;
  });
}

// The first piece of a call has its id and name; later ones only more of its arguments.
function addCall(calls, { index, id, function: { name, arguments: more = "" } }) {
  calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
  calls[index].function.arguments += more;
}
