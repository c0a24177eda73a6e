// The page of any model: its inputs with example values, a button, its outputs.

import { counted, element, find, guarded, settings, start } from "./page.mjs";
import { exampleNumbers, parseNumbers, toArray, toNumbers } from "./numbers.mjs";

const SHOWN = 200;
const FILLS = { random: "random numbers", zeros: "zeros", ones: "ones", counting: "0, 1, 2, ...", typed: "typed below" };

function sizeField({ name, low, high }) {
  const value = settings.sizes?.[name] ?? low;
  const field = element("input", { type: "number", name, min: low, max: high, value, required: true });
  return element("label", {}, `${name}, ${low} to ${high} `, field);
}

function inputField(entry) {
  const options = Object.entries(FILLS).map(([value, text]) => element("option", { value }, text));
  const fill = element("select", { ariaLabel: `values of ${entry.name}` }, ...options);
  const typed = element("textarea", { rows: 3, hidden: true, ariaLabel: `numbers of ${entry.name}`, placeholder: "1, 2.5, -3" });
  const shape = element("code", {}, `${entry.type}[${entry.shape.join(", ")}]`);
  fill.value = settings.fills?.[entry.name] ?? "random";
  fill.onchange = () => { typed.hidden = fill.value !== "typed"; };
  const fieldset = element("fieldset", {}, element("legend", {}, entry.name), element("div", { className: "row" }, shape, fill), typed);
  fieldset.dataset.input = entry.name;
  return { entry, fill, typed, fieldset };
}

const written = (value) => (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(7))));

function outputSection(entry, shape, values) {
  const numbers = toNumbers(entry, values);
  const finite = numbers.filter(Number.isFinite);
  const least = finite.reduce((a, b) => Math.min(a, b), Infinity), most = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  const mean = finite.reduce((a, b) => a + b, 0) / finite.length;
  const about = finite.length === 0 ? "no finite number" : `from ${written(least)} to ${written(most)}, mean ${written(mean)}`;
  const rest = numbers.length > SHOWN ? `, ... (${numbers.length - SHOWN} more)` : "";
  const text = element("p", { className: "values" }, numbers.slice(0, SHOWN).map(written).join(", ") + rest);
  const section = element("section", {}, element("h2", {}, entry.name), element("code", {}, `${entry.type}[${shape.join(", ")}]`), element("span", { className: "faint" }, ` ${counted(numbers.length, "number")}, ${about}`), text);
  section.dataset.output = entry.name;
  return section;
}

await start(async (model) => {
  const { info } = model;
  find("sizes").hidden = info.symbols.length === 0;
  find("reset").hidden = !info.states;
  find("size-fields").append(...info.symbols.map(sizeField));
  const fields = info.inputs.map(inputField);
  find("inputs").append(...fields.map(({ fieldset }) => fieldset));
  find("reset").onclick = guarded(() => model.reset());
  find("form").onsubmit = guarded(async () => {
    const sizes = Object.fromEntries(info.symbols.map(({ name }) => [name, find("form").elements[name].valueAsNumber]));
    const shapes = await model.shapes(sizes);
    const inputs = {};
    fields.forEach(({ entry, fill, typed }, i) => {
      const count = shapes[entry.name].reduce((a, b) => a * b, entry.parts);
      const numbers = fill.value === "typed" ? parseNumbers(typed.value, entry.name) : exampleNumbers(entry.type, count, fill.value, i + 1);
      inputs[entry.name] = toArray(entry, numbers);
    });
    const { outputs, shapes: found, milliseconds } = await model.run(inputs, sizes);
    find("outputs").replaceChildren(...info.outputs.map((entry) => outputSection(entry, found[entry.name], outputs[entry.name])));
    find("time").textContent = `${milliseconds.toFixed(2)} ms`;
  });
});
