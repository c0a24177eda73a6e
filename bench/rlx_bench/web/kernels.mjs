// Times of the kernels of a module that exports them: they are called one by one, in the order of a run.

import { readFileSync } from "node:fs";

const folder = process.argv[2], rounds = Number(process.argv[3]);
const read = (name) => readFileSync(`${folder}/${name}`);
const { calls, inputs, sizes } = JSON.parse(read("calls.json"));
const core = new WebAssembly.Instance(new WebAssembly.Module(read("net.wasm"))).exports;
const given = read("net.weights");

const aligned = (at) => Math.ceil(at / 4096) * 4096;
const weights = aligned(core.heap.value), symbols = aligned(weights + given.length);
const context = symbols + 4096, blocks = aligned(context + Number(core.bytes(1)));
const end = blocks + 8 * calls.reduce((total, { fields }) => total + fields.length, 0);
core.memory.grow(Math.max(0, Math.ceil((end - core.memory.buffer.byteLength) / 65536)));
const bytes = new Uint8Array(core.memory.buffer), words = new BigInt64Array(core.memory.buffer);
const bases = { weight: weights, context, number: 0 };

function check(code) {
  if (code !== 0) throw new Error(`code ${code}`);
}

bytes.set(given, weights);
words.set(sizes.map(BigInt), symbols / 8);
check(core.init(context, weights, BigInt(given.length)));
check(core.bind(context, symbols));
inputs.forEach((name, i) => bytes.set(read(name), core.input(context, i)));
check(core.run(context)); // steps that run once are done now

let at = blocks;
const ready = calls.map(({ kernel, fields }) => {
  const block = at;
  words.set(fields.map(([base, offset]) => BigInt(bases[base] + offset)), block / 8);
  at += 8 * fields.length;
  return { run: core[kernel], block, times: [] };
});
const whole = [];
for (let round = 0; round < rounds; round++) {
  let start = performance.now();
  core.run(context);
  whole.push(performance.now() - start);
  for (const { run, block, times } of ready) {
    start = performance.now();
    run(block, 0n, 1n, 0n);
    times.push(performance.now() - start);
  }
}
const median = (times) => times.sort((a, b) => a - b)[times.length >> 1] * 1000;
console.log(JSON.stringify({ whole: median(whole), kernels: ready.map(({ times }) => median(times)) }));
