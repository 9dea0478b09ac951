// The list of conversations that the browser keeps: open, export, delete.
import { toJson, toMarkdown } from "./conversation.js";
import { at, button, download, make } from "./dom.js";

export class History {
  constructor(chat, store) {
    Object.assign(this, { chat, store });
    at("new").addEventListener("click", () => chat.open());
    at("export-json").addEventListener("click", () => this.export("json", "application/json", toJson));
    at("export-markdown").addEventListener("click", () => this.export("md", "text/markdown", toMarkdown));
    at("delete-all").addEventListener("click", () => this.deleteAll());
    addEventListener("storage", () => this.show()); // another tab has changed something
  }

  show() {
    const current = this.chat.conversation;
    const kept = this.store.all();
    const busy = this.chat.running !== null;
    at("kept").replaceChildren(...kept.map((conversation) => this.entry(conversation, busy)));
    at("kept-none").hidden = kept.length > 0;
    at("delete-all").disabled = busy || !kept.length;
    at("new").disabled = busy;
    for (const id of ["export-json", "export-markdown"]) at(id).disabled = busy || !current.turns.length;
  }

  entry(conversation, busy) {
    const { id, title, updated } = conversation;
    const off = busy ? "" : undefined;
    const here = id === this.chat.conversation.id ? "true" : undefined;
    const day = new Date(updated).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    return make("li", {},
      button(title || "Untitled", () => this.chat.open(conversation), { class: "title", title: day, "aria-current": here, disabled: off }),
      button("Delete", () => this.delete(id, title), { class: "small", "aria-label": `Delete ${title}`, disabled: off }));
  }

  delete(id, title) {
    if (!confirm(`Delete "${title}"? It is kept nowhere else.`)) return;
    this.store.remove(id);
    if (id === this.chat.conversation.id) this.chat.open();
    else this.show();
  }

  deleteAll() {
    const kept = this.store.all();
    if (!confirm(`Delete all ${kept.length} conversations? They are kept nowhere else.`)) return;
    for (const { id } of kept) this.store.remove(id);
    this.chat.open();
  }

  export(ending, type, write) {
    const { conversation } = this.chat;
    const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").toLowerCase() || "conversation";
    download(`${name}.${ending}`, type, write(conversation));
  }
}
