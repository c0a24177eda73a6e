// Commands are lines of JSON at the standard input, and so are the answers at the output.

import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { answer } from "./engines.mjs";

const base = pathToFileURL("/");
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await answer({ ...JSON.parse(line), base })));
}
process.exit(0);
