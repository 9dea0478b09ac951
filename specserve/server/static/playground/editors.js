// The editors of what the answer must be and of the tools that may be called.
import { at, offer } from "./dom.js";
import { FORMATS, TOOLS } from "./examples.js";
import { formatFields, toolFields } from "./request.js";

export function startEditors() {
  offer(at("format-example"), [["", "choose ..."], ...FORMATS.map(([name], index) => [index, name])]);
  offer(at("tools-example"), [["", "choose ..."], ...TOOLS.map(([name], index) => [index, name])]);
  at("format-example").addEventListener("change", () => chosen("format-example", FORMATS, ([, kind, text, message]) => {
    at("format").value = kind;
    at("format-text").value = text;
    return message;
  }));
  at("tools-example").addEventListener("change", () => chosen("tools-example", TOOLS, ([, text, choice, message]) => {
    at("tools").value = text;
    at("tool-choice").value = choice;
    return message;
  }));
  for (const id of ["format", "format-text", "tools"]) at(id).addEventListener("input", check);
  check();
}

// Fills an editor, and the composer where nothing stands in it.
function chosen(id, examples, fill) {
  const example = examples[at(id).value];
  if (example) at("entry").value ||= fill(example);
  at(id).value = "";
  check();
}

// Tells at once what could not be sent.
function check() {
  at("format-text").closest("div").hidden = ["", "json_object"].includes(at("format").value);
  problem("format-text", () => formatFields({ kind: at("format").value, text: at("format-text").value }));
  problem("tools", () => toolFields(at("tools").value, ""));
}

function problem(id, read) {
  let text = "";
  try {
    read();
  } catch (error) {
    text = error.message;
  }
  at(id).setCustomValidity(text);
  at(id).setAttribute("aria-invalid", String(text !== ""));
  at(id + "-problem").textContent = text;
}
