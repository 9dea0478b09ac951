// A conversation: its turns, as they are sent, kept and exported.

// turns: messages as the API has them; what else is known of an answer stands in its `about`: { model, figures, sources }.
export const newConversation = (now = new Date()) => ({
  id: now.getTime().toString(36) + Math.random().toString(36).slice(2, 8),
  title: "",
  updated: now.toISOString(),
  turns: [],
});

export const messagesOf = (turns) => turns.map(({ about, ...message }) => message);

// The turn of an answer that came.
export const answerTurn = ({ text, thought, calls }, about) => ({
  role: "assistant",
  content: text,
  reasoning_content: thought || undefined,
  tool_calls: calls.length ? calls : undefined,
  about,
});

// Whether an answer's calls still wait for their results.
export function openCalls(turns) {
  const last = turns.findLastIndex(({ role }) => role === "assistant");
  const told = new Set(turns.slice(last + 1).map((turn) => turn.tool_call_id));
  return last < 0 ? [] : (turns[last].tool_calls || []).filter(({ id }) => !told.has(id));
}

export function titleOf(turns) {
  const text = (turns.find(({ role }) => role === "user")?.content || "").trim().replace(/\s+/g, " ");
  return text.length > 48 ? text.slice(0, 47) + "…" : text;
}

export const toJson = ({ title, updated, turns }) =>
  JSON.stringify({ title, updated, messages: messagesOf(turns), about: turns.map(({ about }) => about ?? null) }, null, 2) + "\n";

export function toMarkdown({ title, updated, turns }) {
  const parts = [`# ${title}`, updated];
  for (const turn of turns) {
    parts.push("## " + ({ user: "You", tool: "Result of a tool" }[turn.role] || turn.about?.model || "Assistant"));
    if (turn.reasoning_content) parts.push("> " + turn.reasoning_content.replaceAll("\n", "\n> "));
    if (turn.content) parts.push(turn.role === "tool" ? fenced(turn.content, "") : turn.content);
    for (const call of turn.tool_calls || []) parts.push(`Calls \`${call.function.name}\`:`, fenced(call.function.arguments, "json"));
  }
  return parts.join("\n\n") + "\n";
}

// A block of code whose fence is longer than any in it.
function fenced(text, language) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}
