// Numbers as the arrays that a model takes, and back. Half precision has no array everywhere: its bits are u16.

const word = new Uint32Array(1), float = new Float32Array(word.buffer);

function bitsOfHalf(value) {
  float[0] = value;
  const bits = word[0], sign = (bits >>> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (magnitude < 0x38800000) {  // a subnormal number: a multiple of 2 ** -24, ties to even
    const units = Math.abs(float[0]) * 2 ** 24, low = Math.floor(units), rest = units - low;
    return sign | (low + (rest > 0.5 || (rest === 0.5 && low % 2 === 1) ? 1 : 0));
  }
  return sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >>> 13) & 1)) >>> 13);
}

function halfOfBits(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >>> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent === 0 ? sign * fraction * 2 ** -24 : sign * (1024 + fraction) * 2 ** (exponent - 25);
}

function bitsOfBrain(value) {
  float[0] = value;
  return Number.isNaN(value) ? 0x7fc0 : (word[0] + 0x7fff + ((word[0] >>> 16) & 1)) >>> 16;
}

function brainOfBits(bits) {
  word[0] = bits << 16;
  return float[0];
}

const WORDS = { f16: [bitsOfHalf, halfOfBits], bf16: [bitsOfBrain, brainOfBits] };
const whole = (value) => BigInt(Math.trunc(value));

/** The array of an input that has these numbers. */
export function toArray({ type, array }, numbers) {
  const Kind = globalThis[array];
  if (WORDS[type]) return Kind.from(numbers, WORDS[type][0]);
  return Kind.from(numbers, array.startsWith("Big") ? whole : Number);
}

/** The numbers in the array of an output. */
export function toNumbers({ type }, values) {
  return Array.from(values, WORDS[type] ? WORDS[type][1] : Number);
}

/** Numbers from 0 to 1, the same for the same seed. */
export function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

export const isFloat = (type) => /^(f|bf|c)/.test(type);

/** Numbers to try a model with: a normal distribution for floats, 0 and 1 for integers. */
export function exampleNumbers(type, count, fill, seed) {
  const random = randomNumbers(seed);
  const kinds = {
    random: isFloat(type) ? () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random()) : () => Math.floor(2 * random()),
    zeros: () => 0,
    ones: () => 1,
    counting: (_, i) => i,
  };
  return Array.from({ length: count }, kinds[fill]);
}

/** The numbers in a text, between commas or blanks. */
export function parseNumbers(text, name) {
  const words = text.split(/[\s,;[\]]+/).filter((each) => each !== "");
  return words.map((each) => {
    const value = { true: 1, false: 0, inf: Infinity, nan: NaN }[each.toLowerCase()] ?? Number(each);
    if (Number.isNaN(value) && each.toLowerCase() !== "nan") throw new TypeError(`${name}: "${each.slice(0, 40)}" is not a number`);
    return value;
  });
}
