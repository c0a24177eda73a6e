// A conversation with a language model. Keys and values of tokens stay in the model's states, so of a longer
// text only what is new is computed.

import { counted, element, find, guarded, settings, start } from "./page.mjs";
import { LevelTokenizer } from "./bpe.mjs";

/** The text of a conversation up to where the model answers. */
function promptOf(messages, system, { first, system: around, answer, next, trim }) {
  const cut = (text) => (trim ? text.trim() : text);
  const opening = system === "" ? first : around[0] + cut(system) + around[1];
  return opening + messages.map((text, i) => cut(text) + (i % 2 === 0 ? answer : next)).join("");
}

/** The number of a token: the likeliest, or one drawn by the probabilities at a temperature. */
function choose(logits, temperature) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  if (temperature === 0) return best;
  const weights = logits.map((logit) => Math.exp((logit - logits[best]) / temperature));
  let left = Math.random() * weights.reduce((a, b) => a + b, 0);
  return Math.max(0, weights.findIndex((weight) => (left -= weight) < 0));
}

/** What the states of the model hold, and the tokens that follow. */
class Conversation {
  #model; #most; #least; #tokens = [];

  constructor(model) {
    this.#model = model;
    const range = (name) => model.info.symbols.find((symbol) => symbol.name === name);
    this.#most = range("new").high;
    this.#least = range("wanted").low;
  }

  async logits(tokens) {
    let past = 0, found;
    while (past < Math.min(tokens.length - 1, this.#tokens.length) && tokens[past] === this.#tokens[past]) past++;
    this.#tokens.length = past;
    while (past < tokens.length) {
      const part = tokens.slice(past, past + this.#most), ends = past + part.length === tokens.length;
      const wanted = ends || this.#least > 0 ? [part.length - 1] : [];
      const inputs = { past: new Int8Array(), tokens: BigInt64Array.from(part, BigInt), wanted: BigInt64Array.from(wanted, BigInt) };
      const sizes = { past, new: part.length, wanted: wanted.length };
      found = (await this.#model.run(inputs, sizes)).outputs.logits;
      this.#tokens.push(...part);
      past += part.length;
    }
    return found;
  }
}

await start(async (model) => {
  const tokenizer = new LevelTokenizer(await (await fetch("tokenizer.json")).json());
  const conversation = new Conversation(model);
  const messages = [];
  find("system-field").hidden = settings.template.system === null;
  let stopped = false;

  function show(who, text) {
    const turn = element("p", { className: `turn ${who}` }, text);
    find("turns").append(turn);
    turn.scrollIntoView({ block: "nearest" });
    return turn;
  }

  /** The answer to the messages, shown as it comes. */
  async function answer() {
    const tokens = tokenizer.encode(promptOf(messages, find("system").value, settings.template));
    const room = settings.context - tokens.length;
    if (room < 1) throw new RangeError(`the conversation has ${tokens.length} tokens, the context has room for ${settings.context}; begin a new chat`);
    const turn = show("assistant", ""), decode = tokenizer.decoder(), most = Math.min(room, find("most").valueAsNumber);
    const began = performance.now();
    const made = [];
    let first = began, text = "";
    stopped = false;
    while (made.length < most && !stopped) {
      const token = choose(await conversation.logits(tokens), find("temperature").valueAsNumber);
      if (made.length === 0) first = performance.now();
      if (tokenizer.ends.has(token)) break;
      made.push(token);
      tokens.push(token);
      turn.dataset.tokens = made.join(" ");
      turn.textContent = text += decode(token);
      find("turns").scrollTop = find("turns").scrollHeight;
      const rate = (made.length - 1) / ((performance.now() - first) / 1000);
      find("speed").textContent = `${counted(made.length, "token")}${made.length > 1 ? `, ${rate.toFixed(1)} per second` : ""}, the first after ${((first - began) / 1000).toFixed(2)} s`;
    }
    turn.textContent = text += decode();
    turn.dataset.done = "true";
    return text;
  }

  find("form").onsubmit = guarded(async () => {
    const message = find("message").value;
    find("message").value = "";
    messages.push(message);
    show("user", message);
    find("stop").disabled = false;
    try {
      messages.push(await answer());
    } catch (error) {
      messages.pop();  // it was not answered
      throw error;
    } finally {
      find("stop").disabled = true;
      find("message").focus();
    }
  });
  find("stop").onclick = () => { stopped = true; };
  find("reset").onclick = () => {
    messages.length = 0;
    find("turns").replaceChildren();
    find("speed").textContent = "";
  };
});
