// Engines that run one model: what they take and give, and how long it takes. Node and browsers share this.

import * as languages from "./language.mjs";

const NUMBERS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, uint64: BigUint64Array, int32: Int32Array,
  uint32: Uint32Array, int16: Int16Array, uint16: Uint16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
};

async function bytesOf(url) {
  if (url.protocol !== "file:") {
    const response = await fetch(url);
    if (!response.ok) throw new Error(`${url} cannot be loaded: ${response.status}`);
    return response.arrayBuffer();
  }
  const { readFile } = await import("node:fs/promises");
  const { buffer, byteOffset, length } = await readFile(url);
  return buffer.slice(byteOffset, byteOffset + length);
}

/** The inputs of a model: names, types, shapes, and arrays of their elements. */
async function feedOf(folder) {
  const text = new TextDecoder().decode(await bytesOf(new URL("feed.json", folder)));
  const { inputs, sizes } = JSON.parse(text);
  for (const [i, input] of inputs.entries()) input.data = new NUMBERS[input.type](await bytesOf(new URL(`${i}.bin`, folder)));
  return { inputs, sizes };
}

/** RLX's export in a folder. */
async function rlx({ folder, threads }, { inputs, sizes }) {
  const { load, info } = await import(new URL("net.mjs", folder));
  const model = await load(undefined, { threads, cache: false });
  if (model.threads !== threads) throw new Error(`${model.threads} threads run, not ${threads}`);
  model.bind(sizes);
  // In place, like native code next to it: it reads and writes arrays that are there before it runs.
  const arrays = Object.fromEntries(info.inputs.map(({ name }) => [name, model.input(name)]));
  for (const [name, array] of Object.entries(arrays)) array.set(inputs.find((input) => input.name === name).data);
  let last = {};
  return {
    run: () => { last = model.run(arrays, undefined, { copy: false }); },
    outputs: () => info.outputs.map(({ name, type }) => ({ type, shape: model.shape(name), data: last[name] })),
    close: () => model.close(),
  };
}

/** onnxruntime-web with the model as ONNX: SIMD, all optimisations of graphs, as many threads. */
async function ort({ folder, packages, threads }, { inputs }) {
  const place = new URL("onnxruntime-web/dist/", packages);
  const { env, InferenceSession, Tensor } = await import(new URL("ort.wasm.bundle.min.mjs", place));
  env.wasm.wasmPaths = place.href;
  env.wasm.numThreads = threads;
  const session = await InferenceSession.create(new URL("model.onnx", folder).href, {
    executionProviders: ["wasm"], graphOptimizationLevel: "all",
  });
  const feeds = Object.fromEntries(
    inputs.filter(({ name }) => session.inputNames.includes(name)).map(({ name, type, shape, data }) => [name, new Tensor(type, data, shape)]),
  );
  let last = {};
  return {
    run: async () => { last = await session.run(feeds); },
    outputs: () => session.outputNames.map((name) => ({ type: last[name].type, shape: Array.from(last[name].dims), data: last[name].data })),
    close: () => session.release(),
  };
}

const ENGINES = { rlx, ort };
let engine;

function asText(array) {
  const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(text);
}

export const answers = {
  /** Load a model and run it once: `ready` is the time to the first result, `bytes` the number that were given. */
  async make({ engine: name, folder, packages, threads, base }) {
    const at = (path) => path && new URL(path, base);
    const feed = await feedOf(at(folder));
    const start = performance.now();
    engine?.close();
    engine = await ENGINES[name]({ folder: at(folder), packages: at(packages), threads }, feed);
    await engine.run();
    return { ready: (performance.now() - start) / 1000 };
  },
  /** Load a language model and answer a short prompt: `ready` is the time to the first token. */
  async open({ engine: name, folder, packages, threads, base }) {
    const at = (path) => path && new URL(path, base);
    const start = performance.now();
    engine = await languages[name]({ folder: at(folder), packages: at(packages), threads });
    await engine.answer(8, 0);
    return { ready: (performance.now() - start) / 1000 };
  },
  answer: ({ prompt, made }) => engine.answer(prompt, made),
  async warm({ runs }) {
    for (let i = 0; i < runs; i++) await engine.run();
    return { runs };
  },
  /** Seconds of a run; each sample is the mean of `inner` runs. */
  async time({ samples, inner }) {
    await engine.run();
    const times = [];
    for (let i = 0; i < samples; i++) {
      const start = performance.now();
      for (let k = 0; k < inner; k++) {
        const running = engine.run();
        if (running) await running;
      }
      times.push((performance.now() - start) / 1000 / inner);
    }
    return { times };
  },
  async outputs() {
    await engine.run();
    return { outputs: engine.outputs().map(({ type, shape, data }) => ({ type, shape, data: asText(data) })) };
  },
};

/** The answer to a command, or what went wrong. */
export async function answer({ do: what, ...given }) {
  try {
    return await answers[what](given);
  } catch (error) {
    return { error: `${error?.name}: ${error?.message}` };
  }
}
