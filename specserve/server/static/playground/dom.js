// Elements of the page, and what is done with them. Text never becomes HTML here.

export const at = (id) => document.getElementById(id);

// An element; attributes that are functions listen to events of their name.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const button = (text, click, attributes = {}) => make("button", { type: "button", click, ...attributes }, text);

export function tell(element, text, kind = "") {
  element.textContent = text;
  element.className = ("said " + kind).trim();
}

export const offer = (select, choices) => select.replaceChildren(
  ...choices.map(([value, text]) => make("option", { value }, text)));

export const list = (element, pairs) => element.replaceChildren(
  ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));

export function table(caption, head, rows) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell, index) =>
    make(index ? tag : "th", { scope: tag === "th" ? "col" : index ? undefined : "row" }, cell)));
  return make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    make("table", {}, make("caption", {}, caption), make("thead", {}, line(head, "th")),
      make("tbody", {}, ...rows.map((row) => line(row, "td")))));
}

// Keeps the end of the page in sight, if it was before the change; `always`: brings it there.
export function follow(change, always = false) {
  const page = document.documentElement;
  const atEnd = always || page.scrollHeight - page.scrollTop - page.clientHeight < 60;
  change();
  if (atEnd) page.scrollTop = page.scrollHeight;
}

// Resolves to whether the text is on the clipboard. Pages that did not come over HTTPS or from this machine have no
// navigator.clipboard; a selected field can be copied anyway.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const before = document.activeElement;
    const field = make("textarea", { class: "skip", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus();
    return done;
  }
}

export function copyButton(text, name = "Copy") {
  const self = button(name, async () => {
    self.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => { self.textContent = name; }, 1500);
  }, { class: "small" });
  return self;
}

export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
