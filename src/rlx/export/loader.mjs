export const version = INFO.version;
export const info = INFO;

const ARRAYS = {
  Float64Array, Float32Array, BigInt64Array, BigUint64Array, Int32Array, Uint32Array,
  Int16Array, Uint16Array, Int8Array, Uint8Array,
};
const INPUTS = new Set(INFO.inputs.map((entry) => entry.name));
const PAGE = 65536;
const ALIGNMENT = 4096;
const RECORD = 64;
const OWN_NAME = `rlx-${INFO.name}-${INFO.version}`;

export class ModelError extends Error {
  constructor(code, message) {
    super(message);
    this.name = "ModelError";
    this.code = code;
  }
}

export class Model {
  #core; #memory; #context; #sizes; #workers;
  #places = { input: [], output: [] };  // arrays over the memory, at the sizes that are bound
  #bound = INFO.symbols.length === 0;

  constructor(core, context, sizes, workers) {
    this.#core = core;
    this.#memory = core.memory;
    this.#context = context;
    this.#sizes = sizes;
    this.#workers = workers;
    this.threads = workers.length + 1;
  }

  #live() {
    if (this.#core === null) throw new Error(`${INFO.name} is closed; load it again`);
  }

  #needSizes() {
    if (!this.#bound) this.#check(this.#core.run(this.#context));  // which says so
  }

  #check(code) {
    if (code === 0) return;
    const bytes = new Uint8Array(this.#memory.buffer);
    const start = this.#core.error(code);
    throw new ModelError(code, new TextDecoder().decode(bytes.slice(start, bytes.indexOf(0, start))));
  }

  static async start(core, places, bytes, workers) {
    const model = new Model(core, places.context, places.sizes, workers);
    try {
      model.#check(core.init(places.context, places.weights, BigInt(bytes)));
      if (workers.length > 0) {
        const records = core.enlist(places.context, model.threads);
        await Promise.all(workers.map((worker, i) => worker.begin(records + RECORD * (i + 1), places.stacks + INFO.stack * (i + 1))));
      }
    } catch (error) {
      model.close();
      throw error;
    }
    return model;
  }

  close() {
    for (const worker of this.#workers) worker.end();
    this.#core = this.#memory = null;
  }

  bind(sizes) {
    this.#live();
    if (typeof sizes !== "object" || sizes === null) throw new TypeError("sizes must be an object of whole numbers by name");
    const words = new BigInt64Array(this.#memory.buffer, this.#sizes, INFO.symbols.length);
    INFO.symbols.forEach(({ name, low, high }, i) => {
      const size = sizes[name];
      if (!Number.isSafeInteger(size)) throw new TypeError(`size "${name}" must be a whole number from ${low} to ${high}`);
      words[i] = BigInt(size);
    });
    for (const name of Object.keys(sizes)) {
      if (!INFO.symbols.some((symbol) => symbol.name === name)) throw new TypeError(`${INFO.name} has no size "${name}"`);
    }
    this.#check(this.#core.bind(this.#context, this.#sizes));
    this.#bound = true;
    this.#places = { input: [], output: [] };
  }

  run(inputs, sizes, { copy = true } = {}) {
    this.#live();
    if (typeof inputs !== "object" || inputs === null) throw new TypeError("inputs must be an object of typed arrays by name");
    if (sizes !== undefined) this.bind(sizes);
    this.#needSizes();
    for (const name of Object.keys(inputs)) {
      if (!INPUTS.has(name)) throw new TypeError(`${INFO.name} has no input "${name}"`);
    }
    INFO.inputs.forEach((entry, i) => {
      const given = inputs[entry.name];
      if (!(given instanceof ARRAYS[entry.array])) throw new TypeError(`input "${entry.name}" must be a ${entry.array}`);
      const there = this.#view("input", i, entry);
      if (given.length !== there.length) {
        throw new RangeError(`input "${entry.name}" has ${given.length} elements, not ${there.length}, the product of [${this.shape(entry.name)}]`);
      }
      if (given !== there) there.set(given);
    });
    this.#check(this.#core.run(this.#context));
    return Object.fromEntries(INFO.outputs.map((entry, i) => {
      const there = this.#view("output", i, entry);
      return [entry.name, copy ? there.slice() : there];
    }));
  }

  input(name) {
    this.#live();
    this.#needSizes();
    const i = INFO.inputs.findIndex((entry) => entry.name === name);
    if (i < 0) throw new TypeError(`${INFO.name} has no input "${String(name)}"`);
    return this.#view("input", i, INFO.inputs[i]);
  }

  shape(name) {
    this.#live();
    this.#needSizes();
    for (const kind of ["input", "output"]) {
      const i = INFO[`${kind}s`].findIndex((entry) => entry.name === name);
      if (i >= 0) return this.#shape(kind, i, INFO[`${kind}s`][i]);
    }
    throw new TypeError(`${INFO.name} has no input or output "${String(name)}"`);
  }

  reset() {
    this.#live();
    this.#core.reset(this.#context);
  }

  #shape(kind, i, entry) {
    const start = this.#core[`${kind}_shape`](this.#context, i);
    return Array.from(new BigInt64Array(this.#memory.buffer, start, entry.rank), Number);
  }

  #view(kind, i, entry) {
    const start = this.#core[kind](this.#context, i), last = this.#places[kind][i];
    if (last?.byteOffset === start && last.buffer === this.#memory.buffer) return last;
    const count = this.#shape(kind, i, entry).reduce((a, b) => a * b, entry.parts);
    return this.#places[kind][i] = new ARRAYS[entry.array](this.#memory.buffer, start, count);
  }
}

async function open(url, cache) {
  if (url.protocol === "file:") {  // no browser, but Node
    const { readFile } = await import("node:fs/promises");
    return new Response(await readFile(url));
  }
  const kept = cache && globalThis.caches ? await caches.open(OWN_NAME) : null;
  const found = kept ? await kept.match(url) : undefined;
  if (found) return found;
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url} cannot be loaded: ${response.status} ${response.statusText}`);
  // Stored while it arrives; there may be no room for it.
  if (kept) kept.put(url, response.clone()).catch(() => undefined);
  return response;
}

// One worker: a thread that runs its share of every step until it is ended.
async function startWorker(module, memory) {
  const url = new URL(import.meta.url);
  let worker, listen;
  if (globalThis.Worker) {
    worker = new Worker(url, { type: "module", name: OWN_NAME });
    listen = (kind, f) => { worker[`on${kind}`] = (event) => f(event.data ?? event.message); };
  } else {
    const { Worker: Thread } = await import("node:worker_threads");
    worker = new Thread(url, { workerData: OWN_NAME });
    worker.unref();
    listen = (kind, f) => worker.on(kind, f);
  }
  const begin = (record, stack) => new Promise((resolve, reject) => {
    listen("message", resolve);
    listen("error", reject);
    worker.postMessage({ module, memory, record, stack });
  });
  return { begin, end: () => worker.terminate() };
}

function work(port, { module, memory, record, stack }) {
  const core = new WebAssembly.Instance(module, { env: { memory } }).exports;
  core.stack.value = stack;
  port.postMessage("ready");
  core.worker(record);
}

if (globalThis.WorkerGlobalScope && globalThis.name === OWN_NAME) {
  globalThis.onmessage = (event) => work(globalThis, event.data);
} else if (globalThis.process?.versions?.node) {
  const { parentPort, workerData } = await import("node:worker_threads");
  if (workerData === OWN_NAME) parentPort.on("message", (given) => work(parentPort, given));
}

function threadsFor(wanted) {
  const shared = typeof SharedArrayBuffer === "function" && (globalThis.crossOriginIsolated ?? true);
  const cores = globalThis.navigator?.hardwareConcurrency ?? 1;
  if (wanted !== undefined && !(Number.isSafeInteger(wanted) && wanted > 0)) throw new TypeError("threads must be a whole number of at least 1");
  return shared ? wanted ?? Math.min(4, cores) : 1;
}

// A module whose f() multiplies -1 by 1 in four lanes and adds 5, by i32x4.relaxed_dot_i8x16_i7x16_add_s. The
// first compiler of V8 11 uses the register of the sum for something else.
const PRODUCT = "0061736d010000000105016000017f03020100070501016600000a16011400417ffd0f4101fd0f4105fd11fd9302fd1b000b";

async function checkProducts() {
  const bytes = Uint8Array.from(PRODUCT.match(/../g), (digits) => parseInt(digits, 16));
  const { instance } = await WebAssembly.instantiate(bytes);
  if (instance.exports.f() !== 1) throw new Error("this engine multiplies bytes wrong: use a newer one (Chrome 124, Node 22), or export the model for target wasm32");
}

export async function load(url = new URL(".", import.meta.url), options = {}) {
  const { device = "auto", cache = true, onProgress = () => undefined } = options;
  if (device !== "auto" && device !== "wasm") throw new TypeError(`device "${device}" is not known; use "wasm" or "auto"`);
  const threads = threadsFor(options.threads);
  if (INFO.seven) await checkProducts();
  const base = new URL(url, import.meta.url);
  const folder = base.href.endsWith("/") ? base : new URL(`${base.href}/`);
  const file = threads > 1 ? `${INFO.name}.threads.wasm` : `${INFO.name}.wasm`;
  const module = await WebAssembly.compile(await (await open(new URL(file, folder), false)).arrayBuffer());
  const env = threads > 1 ? { memory: new WebAssembly.Memory({ initial: INFO.pages[0], maximum: INFO.pages[1], shared: true }) } : {};
  const core = (await WebAssembly.instantiate(module, { env })).exports;
  const aligned = (at) => Math.ceil(at / ALIGNMENT) * ALIGNMENT;
  const places = { weights: aligned(core.heap.value) };
  places.sizes = aligned(places.weights + INFO.weights);
  places.context = aligned(places.sizes + 8 * INFO.symbols.length);
  places.stacks = aligned(places.context + Number(core.bytes(threads)));
  const missing = places.stacks + INFO.stack * (threads - 1) - core.memory.buffer.byteLength;
  try {
    if (missing > 0) core.memory.grow(Math.ceil(missing / PAGE));
  } catch (cause) {
    throw new Error(`${INFO.name} needs ${missing} bytes more memory than there is`, { cause });
  }
  const response = await open(new URL(`${INFO.name}.weights`, folder), cache);
  const reader = response.body.getReader();
  let loaded = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const bytes = part.value.subarray(0, INFO.weights - loaded);
    new Uint8Array(core.memory.buffer, places.weights + loaded).set(bytes);
    loaded += bytes.length;
    onProgress(loaded, INFO.weights);
  }
  const workers = await Promise.all(Array.from({ length: threads - 1 }, () => startWorker(module, core.memory)));
  try {
    return await Model.start(core, places, loaded, workers);
  } catch (error) {
    if (globalThis.caches) await caches.delete(OWN_NAME);  // what it holds may be what is wrong
    throw error;
  }
}
