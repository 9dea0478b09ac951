// The request of a conversation, from what the fields say.

// `fields`: model, system, maxTokens, temperature, seed, drafter, explain, format { kind, text }, tools, toolChoice;
// empty text where nothing is asked for, which is left to the server. Throws Error for a text that cannot be sent.
export function buildRequest(fields, messages) {
  const system = fields.system.trim() ? [{ role: "system", content: fields.system }] : [];
  const { drafter, explain } = fields;
  const lastOwn = messages.findLast(({ role }) => role === "user");
  return {
    model: fields.model,
    messages: [...system, ...messages],
    max_tokens: numberIn(fields.maxTokens),
    temperature: numberIn(fields.temperature),
    seed: numberIn(fields.seed) ?? Math.floor(Math.random() * 2 ** 31),
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    speculative: drafter || explain ? { drafter: drafter || undefined, explain: explain || undefined } : undefined,
    prediction: drafter === "prediction" ? { type: "content", content: lastOwn.content } : undefined,
    ...formatFields(fields.format),
    ...toolFields(fields.tools, fields.toolChoice),
  };
}

const numberIn = (text) => (text === "" ? undefined : Number(text)); // JSON leaves undefined out

// What the answer must be.
export function formatFields({ kind, text }) {
  if (kind === "") return {};
  if (kind === "json_object") return { response_format: { type: "json_object" } };
  if (!text.trim()) throw new Error("The format is empty.");
  if (kind === "json_schema") {
    const schema = parsed(text, "The schema");
    if (typeof schema !== "object" || schema === null || Array.isArray(schema)) throw new Error("The schema must be a JSON object.");
    return { response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } } };
  }
  if (kind === "choice") return { structured_outputs: { choice: text.split("\n").filter((line) => line.trim()) } };
  return { structured_outputs: { [kind]: text.replace(/\n$/, "") } }; // regex, grammar
}

export function toolFields(text, choice) {
  if (!text.trim()) return {};
  const tools = parsed(text, "The tools");
  if (!Array.isArray(tools) || !tools.length) throw new Error("The tools must be a JSON array of at least one tool.");
  return { tools, tool_choice: choice || undefined };
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} cannot be read as JSON: ${error.message}`, { cause: error });
  }
}
