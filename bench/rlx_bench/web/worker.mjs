import { answer } from "./engines.mjs";

onmessage = async ({ data }) => postMessage(await answer({ ...data, base: location.href }));
