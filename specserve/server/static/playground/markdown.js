// Markdown as elements: marked reads it, DOMPurify lets through what an answer may consist of. Text that looks like HTML
// is shown as text; links lead to web pages and mail only, and an image is a link, as nothing is fetched from elsewhere.
import { Marked } from "../vendor/marked.esm.js";
import "../vendor/purify.min.js";

import { copyButton, follow, make } from "./dom.js";

const TAGS = ["a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong",
  "table", "tbody", "td", "th", "thead", "tr", "ul"];
const RULES = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const EMPTY = new Set(["space", "def"]); // tokens that nothing is shown of

const parser = new Marked({
  gfm: true,
  tokenizer: { html: () => undefined, tag: () => undefined }, // nothing is HTML
  renderer: {
    heading({ tokens, depth }) { // below the page's own headings
      const level = Math.min(6, depth + 2);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    image({ href, title, text, tokens }) {
      return this.link({ href, title, tokens: tokens?.length ? tokens : [{ type: "text", raw: text, text: text || href }] });
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// The elements of a text, or of the tokens that marked has read of it.
export function elementsOf(tokens) {
  const fragment = globalThis.DOMPurify.sanitize(parser.parser(tokens), RULES);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.setAttribute("target", "_blank");
    link.setAttribute("rel", "noopener noreferrer");
  }
  for (const block of fragment.querySelectorAll("pre")) withTitle(block);
  for (const shown of fragment.querySelectorAll("table")) {
    const frame = make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" });
    shown.replaceWith(frame);
    frame.append(shown);
  }
  return fragment;
}

// Puts a line with the language and a button above a block of code.
function withTitle(block) {
  const language = /language-(\S+)/.exec(block.firstElementChild?.className || "")?.[1] || "";
  const frame = make("div", { class: "code" });
  block.replaceWith(frame);
  block.setAttribute("tabindex", "0");
  block.setAttribute("role", "group");
  block.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  frame.append(make("div", { class: "row" }, make("span", {}, language), copyButton(() => block.textContent, "Copy code")), block);
}

// Shows a text that grows in an element: at most once a frame, and of the blocks only those that have changed.
export class Markdown {
  constructor(element) {
    Object.assign(this, { element, blocks: [], text: "", frame: 0 }); // blocks: { raw, nodes }
  }

  set(text) {
    this.text = text;
    this.frame ||= requestAnimationFrame(() => this.render());
  }

  // Everything anew: only the whole text tells what `[name]` refers to.
  finish() {
    cancelAnimationFrame(this.frame);
    this.blocks = [];
    this.element.replaceChildren();
    this.render();
  }

  render() {
    this.frame = 0;
    const tokens = parser.lexer(this.text).filter(({ type }) => !EMPTY.has(type));
    let same = 0;
    while (same < this.blocks.length && same < tokens.length && this.blocks[same].raw === tokens[same].raw) same++;
    follow(() => {
      for (const { nodes } of this.blocks.splice(same)) for (const node of nodes) node.remove();
      for (const token of tokens.slice(same)) {
        const nodes = [...elementsOf([token]).childNodes];
        this.element.append(...nodes);
        this.blocks.push({ raw: token.raw, nodes });
      }
    });
  }
}
