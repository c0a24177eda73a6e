// Runs exports as they are asked for: lines of JSON in, lines of JSON out, bytes as base64.

import fs from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

async function run({ folder, sizes, threads }) {
  const { load, info } = await import(pathToFileURL(`${folder}/net.mjs`));
  const model = await load(undefined, { threads });
  if (info.symbols.length > 0) model.bind(sizes);
  const arrays = info.inputs.map(({ name, array }, i) => {
    const { buffer, byteOffset, length } = fs.readFileSync(`${folder}/${i}.bin`);
    return [name, new globalThis[array](buffer.slice(byteOffset, byteOffset + length))];
  });
  const found = model.run(Object.fromEntries(arrays));
  model.close();
  return info.outputs.map(({ name }) => {
    const { buffer, byteOffset, byteLength } = found[name];
    return Buffer.from(buffer, byteOffset, byteLength).toString("base64");
  });
}

for await (const line of createInterface({ input: process.stdin })) {
  const told = await run(JSON.parse(line)).then((outputs) => ({ outputs }), (error) => ({ error: String(error.stack) }));
  console.log(JSON.stringify(told));
}
