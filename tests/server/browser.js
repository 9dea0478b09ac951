// A stand-in for a browser: builds a page's elements, runs its script, does what a person would, and prints what the
// page shows then. Knows of a browser only what the playground uses; what it does not know fails loudly.
"use strict";
const vm = require("node:vm");
const { readFileSync } = require("node:fs");

const { body, script, address, replies, actions } = JSON.parse(readFileSync(0, "utf8"));
const PROPERTIES = ["value", "hidden", "disabled", "open"];

class Element {
  constructor(tag, attributes = {}) {
    Object.assign(this, { tag, attributes: {}, children: [], listeners: {}, focus() {} });
    for (const name of ["hidden", "disabled", "open"]) this[name] = name in attributes;
    for (const [name, value] of Object.entries(attributes)) this.setAttribute(name, value ?? "");
    this.valid = true;
  }
  setAttribute(name, value) {
    if (/^on|^style$/.test(name)) throw new Error("the policy forbids the attribute " + name);
    if (["hidden", "disabled", "open"].includes(name)) this[name] = true;
    else this.attributes[name] = String(value);
  }
  get value() {
    if (this.chosen !== undefined) return this.chosen;
    return (this.tag === "select" ? this.children[0]?.attributes.value : this.attributes.value) ?? "";
  }
  set value(text) { this.chosen = String(text); }
  get className() { return this.attributes.class ?? ""; }
  set className(text) { this.attributes.class = text; }
  get textContent() { return this.children.map((child) => child.textContent ?? child).join(""); }
  set textContent(text) { this.children = [String(text)]; }
  append(...children) { this.children.push(...children.map((child) => (child instanceof Element ? child : String(child)))); }
  replaceChildren(...children) { this.children = []; this.append(...children); }
  addEventListener(type, listener) { (this.listeners[type] ??= []).push(listener); }
  dispatch(type, fields = {}) {
    const event = { type, target: this, prevented: false, preventDefault() { this.prevented = true; }, ...fields };
    for (const listener of this.listeners[type] ?? []) listener(event);
    return event;
  }
  requestSubmit() { this.dispatch("submit"); }
  checkValidity() { return this.all().every(({ valid }) => valid); }
  reportValidity() { return this.checkValidity(); }
  all() { return [this, ...this.children.flatMap((child) => (child instanceof Element ? child.all() : []))]; }
  shown() {
    const properties = Object.fromEntries(PROPERTIES.filter((name) => this[name]).map((name) => [name, this[name]]));
    const children = this.children.map((child) => (child instanceof Element ? child.shown() : child));
    return { tag: this.tag, ...this.attributes, ...properties, children, text: this.textContent };
  }
}
for (const name of ["innerHTML", "outerHTML"]) {
  Object.defineProperty(Element.prototype, name, { set() { throw new Error(name + " reads text as HTML"); } });
}

function build(node) {
  if (typeof node === "string") return node;
  const element = new Element(node.tag, node.attributes);
  element.append(...node.children.map(build));
  return element;
}

const root = build(body);
const byId = (id) => root.all().find(({ attributes }) => attributes.id === id) ?? null;
const document = Object.assign(new Element("document"), {
  visibilityState: "visible",
  documentElement: { scrollHeight: 0, scrollTop: 0, clientHeight: 0 },
  getElementById: byId,
  createElement: (tag) => new Element(tag),
  querySelectorAll: (selector) => {
    const [tag, kind] = selector.split(".");
    return root.all().filter((element) => element.tag === tag && element.className.split(" ").includes(kind));
  },
});

// --- the server: a real one, or what was written down for each path, in its pieces

const requests = [];
let active = 0; // responses that have not come whole, and will
const turn = () => new Promise(setImmediate);

function scripted(path, signal) {
  const left = replies[path];
  if (!left) throw new Error("nobody expected a request to " + path);
  const reply = left.length > 1 ? left.shift() : left[0];
  if (reply.ends === "refused") throw new TypeError("fetch failed");
  const pieces = reply.pieces.map((piece) => Buffer.from(piece, "base64"));
  const stream = new ReadableStream({
    async start(controller) {
      signal?.addEventListener("abort", () => controller.error(signal.reason));
      for (const piece of pieces) {
        controller.enqueue(new Uint8Array(piece));
        await turn();
      }
      if (reply.ends === "broken") controller.error(new TypeError("terminated"));
      else if (reply.ends !== "hangs") controller.close();
      active--;
    },
  });
  active++;
  return new Response(stream, { status: reply.status ?? 200, statusText: reply.reason ?? "OK" });
}

async function real(url, options) {
  active++;
  try {
    const response = await fetch(url, options);
    const whole = await response.arrayBuffer();
    return new Response(whole, { status: response.status, statusText: response.statusText });
  } finally {
    active--;
  }
}

async function asked(url, options = {}) {
  const path = url.href.slice(new URL(".", address).href.length - 1);
  requests.push({ path, method: options.method ?? "GET", headers: options.headers, body: options.body });
  return replies ? scripted(path, options.signal) : real(url, options);
}

// --- a person

let tick;
const shots = [];
const act = {
  type: (id, text) => { byId(id).value = text; },
  spoil: (id) => { byId(id).valid = false; },
  press: (id, key, fields) => byId(id).dispatch("keydown", { key, shiftKey: false, isComposing: false, ...fields }),
  submit: (id) => byId(id).requestSubmit(),
  click: (id) => byId(id).disabled || byId(id).dispatch("click"),
  compare: () => document.querySelectorAll("button.compare").at(-1).dispatch("click"),
  look: (state) => { document.visibilityState = state; document.dispatch("visibilitychange"); },
  wait: () => tick(),
  shoot: () => shots.push(root.shown()),
};

async function settle() {
  for (let quiet = 0; quiet < 20; quiet = active ? 0 : quiet + 1) await turn();
}

async function main() {
  const context = vm.createContext({
    document, fetch: asked, location: { href: address }, setInterval: (callback) => { tick = callback; },
    URL, AbortController, TextDecoderStream, console,
  });
  vm.runInContext(script, context);
  await settle();
  for (const [name, ...rest] of actions) {
    act[name](...rest);
    await settle();
  }
  console.log(JSON.stringify({ requests, shots: [...shots, root.shown()] }));
}

main();
