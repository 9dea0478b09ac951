// The playground: starts its parts and connects them with the page's controls.
import { Chat } from "./chat.js";
import { at, button, offer, tell } from "./dom.js";
import { startEditors } from "./editors.js";
import { STARTERS } from "./examples.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { Server } from "./server.js";
import { Store, browserStorage } from "./store.js";

const base = new URL(".", location.href);
const server = new Server(base, askForKey);
const store = new Store(browserStorage(), base.pathname);
const chat = new Chat(server, store, fields, update);
const history = new History(chat, store);
const live = new Live(server, load);

function fields() {
  const [text, explain] = [(id) => at(id).value, at("view").value === "drafts"];
  return {
    model: text("model"), system: text("system"), maxTokens: text("max-tokens"), temperature: text("temperature"),
    seed: text("seed"), drafter: text("drafter"), explain, format: { kind: text("format"), text: text("format-text") },
    tools: text("tools"), toolChoice: text("tool-choice"),
  };
}

// What may be pressed now.
function update() {
  const busy = chat.running !== null;
  at("send").disabled = busy || chat.drafter === null;
  at("stop").disabled = !busy;
  for (const button of document.querySelectorAll("button.idle")) button.disabled = busy;
  at("starters").hidden = busy || at("log").childElementCount > 0;
  history.show();
}

// A message to begin with, which can be changed before it is sent. It is greedy unless a temperature is set.
function begin(message) {
  at("temperature").value ||= "0";
  at("entry").value = message;
  at("entry").focus();
}

async function load() {
  const [models, info] = await Promise.all([server.read("v1/models"), server.read("server_info")]);
  const { drafter, drafters } = info.engine;
  offer(at("model"), models.data.map(({ id }) => [id, id]));
  const texts = { none: "none (drafting off)", prediction: "prediction (your message)" };
  offer(at("drafter"), [["", `default (${drafter})`], ...drafters.map((name) => [name, texts[name] || name])]);
  chat.drafter = drafter;
  update();
}

// --- the key

function askForKey() {
  tell(at("key-said"), server.key ? "The server does not know this key." : "", "wrong");
  document.body.classList.add("locked");
  at("key-page").hidden = false;
  at("key").select();
  at("key").focus();
}

function useKey(event) {
  event.preventDefault();
  server.key = at("key").value.trim();
  server.locked = false;
  document.body.classList.remove("locked");
  at("key-page").hidden = true;
  at("entry").focus();
  live.look();
}

// --- controls

function send(event) {
  event.preventDefault();
  for (const field of at("settings").querySelectorAll(":invalid")) { // what is wrong must be in sight
    for (let fold = field.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  }
  if (at("send").disabled || !at("settings").reportValidity()) return;
  chat.send(at("entry").value);
}

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("compose").requestSubmit();
}

function stopOnEscape(event) {
  if (event.key === "Escape" && chat.running && !event.isComposing) chat.stop();
}

// How answers are shown; only those asked for with explanations have drafts to mark.
function view() {
  at("log").dataset.view = at("view").value;
  at("steps-legend").hidden = at("view").value !== "steps";
  at("sources-legend").hidden = at("view").value !== "drafts";
}

at("compose").addEventListener("submit", send);
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("key-form").addEventListener("submit", useKey);
at("entry").addEventListener("keydown", sendOnEnter);
document.addEventListener("keydown", stopOnEscape);
at("stop").addEventListener("click", () => chat.stop());
at("view").addEventListener("change", view);
if (matchMedia("(max-width: 40rem)").matches) for (const id of ["fold", "live-fold"]) at(id).open = false;
at("starters").append(...STARTERS.map(([name, message]) => button(name, () => begin(message), { class: "small" })));
startEditors();
view();
update();
at("entry").focus();
live.start();
