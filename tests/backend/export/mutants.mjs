// Mutants of the weights and of the arguments of an exported model, in Node; test_wasm_mutants.py runs it.
import fs from "node:fs";
import { load, ModelError } from "./net.mjs";

const [first, last] = process.argv.slice(2).map(Number);
let state = 0;
const random = (n) => {  // mulberry32
  state = (state + 0x6d2b79f5) >>> 0;
  let t = Math.imul(state ^ (state >>> 15), state | 1);
  t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
  return ((t ^ (t >>> 14)) >>> 0) % n;
};
const pick = (list) => list[random(list.length)];
const whole = fs.readFileSync("net.weights"), other = fs.readFileSync("other.weights"), HEADER = 4096;
const feed = () => ({ x: Float32Array.from({ length: 15 }, (_, i) => i / 7), at: BigInt64Array.of(0n, 4n) });
const same = (a, b) => a.length === b.length && a.every((value, i) => Object.is(value, b[i]));
const found = { errors: {}, unchanged: 0, wrong: [] };
fs.mkdirSync("copy", { recursive: true });
for (const file of ["net.wasm", "net.threads.wasm"]) fs.copyFileSync(file, `copy/${file}`);
const here = new URL("./copy/", import.meta.url);
const good = await load(undefined, { threads: 1 });
const expected = good.run(feed(), { n: 5 }).y;

function sealed(bytes) {  // with the right checksum, so that any value is loaded
  let total = 0n, factor = 1n;
  for (let at = HEADER; at < bytes.length; at += 8, factor += 2n) total += bytes.readBigUInt64LE(at) * factor;
  bytes.writeBigUInt64LE(BigInt.asUintN(64, total), 24);
  return bytes;
}

const WEIGHTS = {
  header: (b) => { b[random(32)] ^= 1 << random(8); return b; },
  padding: (b) => { b[32 + random(HEADER - 32)] ^= 1 << random(8); return b; },
  body: (b) => { b[HEADER + random(b.length - HEADER)] ^= 1 << random(8); return b; },
  noise: (b) => { for (let i = 0; i < 50; i++) b[random(b.length)] = random(256); return b; },
  cut: (b) => b.subarray(0, random(b.length)),
  longer: (b) => Buffer.concat([b, Buffer.alloc(1 + random(9000), random(256))]),
  other: () => other,
  missing: () => null,
  sealed: (b) => { for (let i = 0; i < 20; i++) b[HEADER + random(b.length - HEADER)] = random(256); return sealed(b); },
};

async function damagedWeights() {
  const kind = pick(Object.keys(WEIGHTS)), bytes = WEIGHTS[kind](Buffer.from(whole));
  fs.rmSync("copy/net.weights", { force: true });
  if (bytes !== null) fs.writeFileSync("copy/net.weights", bytes);
  const model = await load(here, { threads: 1 });
  const { y } = model.run(feed(), { n: 5 });
  if (kind === "sealed") return;  // other weights, other values
  if (!["padding", "longer"].includes(kind) && !bytes.equals(whole)) throw new Error("CRASH: damaged weights were taken");
  if (!same(y, expected)) throw new Error("CRASH: another result");
}

const ODD = [undefined, null, NaN, -1, 0, 1.5, 6, 1e300, 2 ** 31, 2 ** 53, "5", 5n, {}, [], Symbol("n"), () => 5, true];
const ARRAYS = [new Float32Array(15), new Float32Array(0), new Float32Array(10000), new Float64Array(15), new Array(15), new DataView(new ArrayBuffer(60)), new BigInt64Array(2), new Uint8Array(15), new Float32Array(new SharedArrayBuffer(60))];
const EXTREMES = [0n, 4n, 5n, -1n, -5n, -6n, 2n ** 31n, 2n ** 32n, -(2n ** 63n), 2n ** 63n - 1n, 2n ** 62n];

const ARGUMENTS = {
  sizes: (m) => m.run(feed(), { n: pick(ODD) }),
  names: (m) => m.bind(pick([{}, { n: 5, m: 5 }, { __proto__: { n: 5 } }, { N: 5 }, null, 5, "n"])),
  input: (m) => m.run({ ...feed(), [pick(["x", "at"])]: pick([...ODD, ...ARRAYS]) }, { n: 5 }),
  more: (m) => m.run(pick([{ ...feed(), z: new Float32Array(3) }, {}, null, undefined, 7, "x", { x: feed().x }]), { n: 5 }),
  index: (m) => m.run({ ...feed(), at: BigInt64Array.of(pick(EXTREMES), pick(EXTREMES)) }, { n: 5 }),
  values: (m) => m.run({ ...feed(), x: Float32Array.from({ length: 15 }, () => pick([NaN, Infinity, -Infinity, 3e38, -0, 1e-45])) }, { n: 5 }),
  detached: (m) => {
    const given = feed();
    structuredClone(given.x.buffer, { transfer: [given.x.buffer] });
    return m.run(given, { n: 5 });
  },
  shape: (m) => m.shape(pick([...ODD, "x", "y", "constructor"])),
  unbound: async (m) => { const fresh = await load(undefined, { threads: 1 }); return pick([() => fresh.run(feed()), () => fresh.shape("x")])(); },
  closed: async () => { const fresh = await load(undefined, { threads: 1 }); fresh.close(); return pick([() => fresh.run(feed(), { n: 5 }), () => fresh.bind({ n: 5 }), () => fresh.shape("x"), () => fresh.reset()])(); },
  options: () => load(pick([undefined, here]), pick([{ threads: pick(ODD) }, { device: pick(ODD) }, { cache: pick(ODD), threads: 1 }])),
  folder: () => load(pick(["nowhere/", "./copy/nothing", "file:///dev/null/", "data:,", "net.mjs"]), { threads: 1 }),
};

async function wrongArguments() {
  try {
    const made = await ARGUMENTS[pick(Object.keys(ARGUMENTS))](good);
    if (made?.close) made.close();
  } finally {
    good.reset();
    if (!same(good.run(feed(), { n: 5 }).y, expected)) throw new Error("CRASH: the model is spoilt");
    good.reset();
  }
}

for (let seed = first; seed < last; seed++) {
  state = seed * 7919;
  try {
    await (seed % 2 ? damagedWeights() : wrongArguments());
    found.unchanged++;
  } catch (error) {
    const bad = !(error instanceof Error) || error instanceof WebAssembly.RuntimeError || !error.message || error.message.startsWith("CRASH");
    if (bad) found.wrong.push(`${seed}: ${error}`);
    const text = `${error.name}: ${error.message}`.replace(/\d+/g, "N");
    found.errors[text] = (found.errors[text] ?? 0) + 1;
  }
}
console.log(JSON.stringify(found));
