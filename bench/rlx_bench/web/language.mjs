// Language models: seconds of prompts and of tokens one by one, and how long the first answer takes.

const WORDS = "the model reads a text and says what comes next in it because that is what it was made for and ".split(" ");

/** A text of about so many tokens that begins with a number of its own, so that nothing of another is reused. */
const textOf = (tokens, number) => `${number}: ` + Array.from({ length: tokens - 4 }, (_, i) => WORDS[i % (WORDS.length - 1)]).join(" ");

/** RLX's export of a decoder. */
export async function rlx({ folder, threads }) {
  const { load, info } = await import(new URL("net.mjs", folder));
  const model = await load(undefined, { threads, cache: false });
  const most = info.symbols.find(({ name }) => name === "new").high;
  const past = new Int8Array();
  function step(before, tokens, wanted) {
    const inputs = { past, tokens: BigInt64Array.from(tokens, BigInt), wanted: BigInt64Array.from(wanted ? [tokens.length - 1] : [], BigInt) };
    return model.run(inputs, { past: before, new: tokens.length, wanted: wanted ? 1 : 0 }).logits;
  }
  function read(tokens) {
    let logits;
    for (let at = 0; at < tokens.length; at += most) logits = step(at, tokens.slice(at, at + most), at + most >= tokens.length);
    return logits;
  }
  return {
    async answer(prompt, count) {
      const tokens = Array.from({ length: prompt }, (_, i) => 1000 + 7 * i);
      const start = performance.now();
      let logits = read(tokens);
      const middle = performance.now();
      for (let i = 0; i < count; i++) logits = step(prompt + i, [logits.indexOf(Math.max(...logits))], true);
      return { prompt, read: (middle - start) / 1000, made: count, wrote: (performance.now() - middle) / 1000 };
    },
    close: () => model.close(),
  };
}

/** wllama with the same file: its own times, which leave out the way to its worker. */
export async function wllama({ folder, packages, threads }) {
  const place = new URL("@wllama/wllama/esm/", packages);
  const { Wllama, LoggerWithoutDebug } = await import(new URL("index.js", place));
  const model = new Wllama({ default: new URL("wasm/wllama.wasm", place).href }, { logger: LoggerWithoutDebug });
  const file = await (await fetch(new URL("model.gguf", folder))).blob();
  await model.loadModel([file], { n_ctx: 1024, n_threads: threads, n_gpu_layers: 0, n_parallel: 1 });
  let number = 0;
  return {
    async answer(prompt, count) {
      const text = textOf(prompt, 100 + number++);
      const { timings } = await model.createCompletion({ prompt: text, max_tokens: count + 1, temperature: 0, ignore_eos: true });
      return { prompt: timings.prompt_n, read: timings.prompt_ms / 1000, made: timings.predicted_n - 1, wrote: timings.predicted_ms / 1000 };
    },
    close: () => model.exit(),
  };
}
