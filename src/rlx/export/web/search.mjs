// Semantic search: sentences become vectors, and those nearest to the query come first.

import { counted, element, find, guarded, settings, start } from "./page.mjs";
import { WordPiece } from "./wordpiece.mjs";
import { toArray } from "./numbers.mjs";

await start(async (model) => {
  const { info } = model;
  const tokenizer = new WordPiece(await (await fetch("tokenizer.json")).json());
  const [batch, seq] = info.inputs.find(({ name }) => name === "input_ids").shape;
  const longest = info.symbols.find(({ name }) => name === seq)?.high ?? seq;
  const known = new Map();

  /** The vector of a text, of length 1. */
  async function vectorOf(text) {
    if (known.has(text)) return known.get(text);
    const tokens = tokenizer.encode(text, longest);
    const values = { input_ids: tokens, attention_mask: tokens.map(() => 1), token_type_ids: tokens.map(() => 0) };
    const inputs = Object.fromEntries(info.inputs.map((entry) => [entry.name, toArray(entry, values[entry.name])]));
    const sizes = Object.fromEntries([[batch, 1], [seq, tokens.length]].filter(([name]) => typeof name === "string"));
    const { outputs } = await model.run(inputs, sizes);
    const vector = outputs[settings.output];
    const length = Math.hypot(...vector);
    known.set(text, vector.map((value) => value / length));
    return known.get(text);
  }

  function result({ text, score }) {
    const value = Math.max(0, score);
    const top = element("div", { className: "row apart" }, element("span", { className: "text" }, text), element("code", {}, score.toFixed(3)));
    return element("li", {}, top, element("progress", { className: "bar", max: 1, value, ariaHidden: "true" }));
  }

  const search = guarded(async () => {
    const texts = find("sentences").value.split("\n").map((line) => line.trim()).filter((line) => line !== "");
    const new_ = texts.filter((text) => !known.has(text)).length;
    let began = performance.now();
    const vectors = [];
    for (const [i, text] of texts.entries()) {
      find("time").textContent = `Reading sentence ${i + 1} of ${texts.length}`;
      vectors.push(await vectorOf(text));
    }
    const reading = performance.now() - began;
    began = performance.now();
    const asked = await vectorOf(find("query").value.trim());
    const taken = performance.now() - began;
    const found = texts.map((text, i) => ({ text, score: vectors[i].reduce((sum, value, at) => sum + value * asked[at], 0) }));
    found.sort((a, b) => b.score - a.score);
    find("results").replaceChildren(...found.map(result));
    const read = new_ === 0 ? "" : `; ${counted(new_, "sentence")} read in ${reading.toFixed(0)} ms`;
    find("time").textContent = `Query: ${taken.toFixed(1)} ms${read}`;
  });

  find("sentences").value = settings.sentences.join("\n");
  find("query").value = settings.queries[0] ?? "";
  find("form").onsubmit = search;
  find("examples").append(...settings.queries.map((query) => {
    const button = element("button", { type: "button", className: "plain" }, query);
    button.onclick = () => {
      find("query").value = query;
      find("form").requestSubmit();
    };
    return button;
  }));
});
