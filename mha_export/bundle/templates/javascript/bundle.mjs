// What an app needs to use a bundle with onnxruntime-node or onnxruntime-web. Imports nothing, so it
// runs in Node and in a page. `read(path)` gives a file's bytes (Uint8Array), or null where it's missing.

export class CheckError extends Error {}

async function sha256(bytes) {
  const digest = await crypto.subtle.digest("SHA-256", bytes);
  return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// manifest.json, its own hash checked: of its bytes with the 64 digits set to zero.
export async function readManifest(read) {
  const bytes = await read("manifest.json");
  if (!bytes) throw new CheckError("manifest.json: missing");
  const text = new TextDecoder().decode(bytes);
  let manifest;
  try {
    manifest = JSON.parse(text);
  } catch (error) {
    throw new CheckError(`manifest.json: damaged (${error.message})`);
  }
  const stated = String(manifest.sha256);
  const blank = text.replace(stated, "0".repeat(64));
  if ((await sha256(new TextEncoder().encode(blank))) !== stated) {
    throw new CheckError("manifest.json: changed (its sha256 is not the one it states)");
  }
  return manifest;
}

// Every file that `wanted` says yes to is there and unchanged.
export async function checkFiles(read, manifest, wanted = () => true) {
  for (const [name, { sha256: stated }] of Object.entries(manifest.files)) {
    if (!wanted(name)) continue;
    const bytes = await read(name);
    if (!bytes) throw new CheckError(`${name}: missing`);
    const found = await sha256(bytes);
    if (found !== stated) throw new CheckError(`${name}: changed (sha256 ${found})`);
  }
}

// "1.30.0-dev" is [1, 30, 0].
export function numbers(version) {
  const found = [];
  for (const part of version.split(".")) {
    const digits = /^\d*/.exec(part)[0];
    if (digits) found.push(Number(digits));
    if (digits !== part) break;
  }
  return found;
}

function atLeast(version, minimum) {
  const [a, b] = [numbers(version), numbers(minimum)];
  for (let i = 0; i < b.length; i += 1) {
    if (i >= a.length) return false;
    if (a[i] !== b[i]) return a[i] > b[i];
  }
  return true;
}

// The first variant, in the manifest's order, that `runtime` can run; and the provider. `want` leaves
// only that variant. The error says what came closest: a version too old, before a provider that is
// not there, before a runtime no variant is for.
export function choose(manifest, runtime, version, providers, want = null) {
  const variants = manifest.variants.filter((v) => want === null || v.target === want);
  if (!variants.length) throw new CheckError(`unknown: the bundle holds no variant ${want}`);
  let [closest, reason] = [3, ""];
  for (const variant of variants) {
    const own = variant.runs_on.filter((place) => place.runtime === runtime);
    const here = own.filter((place) => providers.includes(place.provider));
    const fit = here.find((place) => atLeast(version, place.minimum));
    if (fit) return { variant, provider: fit.provider };
    const name = variant.target;
    const [rank, words] = here.length
      ? [0, `older: ${name} needs ${runtime} ${here[0].minimum}; this is ${version}`]
      : own.length
        ? [1, `provider: ${name} needs ${own[0].provider}; here are ${providers.join(", ")}`]
        : [2, `runtime: ${name} is not for ${runtime}`];
    if (rank < closest) [closest, reason] = [rank, words];
  }
  throw new CheckError(reason);
}

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: globalThis.Float16Array ?? Uint16Array,
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array,
  int32: Int32Array, uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array,
  bool: Uint8Array,
};

// An array of `dtype` on a copy of bytes, or of a length.
export function arrayOf(dtype, content) {
  const Kind = ARRAYS[dtype];
  if (!Kind) throw new CheckError(`onnxruntime's JavaScript API has no element type ${dtype}`);
  return new Kind(typeof content === "number" ? content : content.slice().buffer);
}

function integers(dtype, values) {
  return ARRAYS[dtype] === BigInt64Array || ARRAYS[dtype] === BigUint64Array
    ? ARRAYS[dtype].from(values, BigInt)
    : ARRAYS[dtype].from(values);
}

// Inputs of a known answer as tensors of `ort`.
export function inputsOf(ort, bytes, known) {
  return Object.fromEntries(
    known.inputs.map((t) => {
      const piece = bytes.subarray(t.offset, t.offset + t.bytes);
      return [t.name, new ort.Tensor(t.dtype, arrayOf(t.dtype, piece), t.shape)];
    }),
  );
}

function fromHalf(bits) {
  const [sign, exponent, part] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 0) return sign * part * 2 ** -24;
  if (exponent === 31) return part ? NaN : sign * Infinity;
  return sign * (1 + part / 1024) * 2 ** (exponent - 15);
}

// The largest error, in units of its row's bound. Over 1 is imprecise; too far is an error.
export async function checkAnswer(bytes, known, outputs) {
  let worst = 0;
  for (const t of known.outputs) {
    const tensor = outputs[t.name];
    if (!tensor || tensor.dims.join() !== t.shape.join()) {
      throw new CheckError(`answer '${known.name}': ${t.name} has shape [${tensor?.dims}]`);
    }
    const found = await tensor.getData();
    const half = tensor.type === "float16" && found instanceof Uint16Array;
    const exact = arrayOf(t.dtype, bytes.subarray(t.offset, t.offset + t.bytes));
    const rowsOf = (offset) => arrayOf("float32", bytes.subarray(offset, offset + 4 * t.rows));
    const [bound, coarse] = [rowsOf(t.bound), rowsOf(t.coarse)];
    const length = exact.length / t.rows;
    for (let i = 0; i < exact.length; i += 1) {
      const row = Math.floor(i / length);
      const [a, b] = [half ? fromHalf(found[i]) : Number(found[i]), Number(exact[i])];
      const error = a === b || (Number.isNaN(a) && Number.isNaN(b)) ? 0 : Math.abs(a - b);
      if (!(error <= coarse[row])) {
        const what = `${t.name} is off by ${error.toPrecision(3)}`;
        throw new CheckError(`answer '${known.name}': ${what}, bound ${bound[row].toPrecision(3)}`);
      }
      worst = Math.max(worst, error / bound[row]);
    }
  }
  return worst;
}

// Greedy tokens after `prompt`, one at a time; keys and values stay in the cache.
export async function* generate(ort, session, manifest, prompt, count, longest) {
  const { cache } = manifest;
  const values = Object.fromEntries(manifest.inputs.map((value) => [value.name, value]));
  let room = cache.growth === "concat" ? null : longest; // of a static cache
  let past = {};
  for (const { past: name, axis } of cache.tensors) {
    const dims = values[name].shape.map((size) => (typeof size === "number" ? size : 1));
    if (room !== null && typeof values[name].shape[axis] === "number") room = dims[axis];
    dims[axis] = room ?? 0;
    const size = dims.reduce((a, b) => a * b, 1);
    past[name] = new ort.Tensor(values[name].dtype, arrayOf(values[name].dtype, size), dims);
  }
  if (room !== null && room < longest) {
    throw new CheckError(`the cache has room for ${room} tokens, prompt included, not ${longest}`);
  }
  let [fresh, done] = [prompt, 0];
  for (let step = 0; step < count; step += 1) {
    const total = done + fresh.length;
    const width = room ?? total;
    const feeds = { ...past };
    const give = (name, numbers, dims) => {
      if (name == null) return;
      const { dtype } = values[name];
      feeds[name] = new ort.Tensor(dtype, integers(dtype, numbers), dims);
    };
    give(cache.tokens[0], fresh, [1, fresh.length]);
    give(cache.positions, fresh.map((_, i) => done + i), [1, fresh.length]);
    give(cache.mask, Array.from({ length: width }, (_, i) => Number(i < total)), [1, width]);
    give(cache.total_length, [total], [1]);
    const outputs = await session.run(feeds);
    const logits = await outputs[cache.logits].getData();
    const vocabulary = outputs[cache.logits].dims.at(-1);
    const half = logits instanceof Uint16Array ? fromHalf : Number;
    let best = logits.length - vocabulary;
    for (let i = best; i < logits.length; i += 1) if (half(logits[i]) > half(logits[best])) best = i;
    const token = best - (logits.length - vocabulary);
    past = Object.fromEntries(cache.tensors.map((t) => [t.past, outputs[t.present]]));
    [fresh, done] = [[token], total];
    yield token;
  }
}

export async function checkGeneration(ort, session, manifest) {
  const known = manifest.generation;
  if (!known) return;
  const found = [];
  const longest = known.prompt.length + known.tokens.length;
  for await (const token of generate(
    ort, session, manifest, known.prompt, known.tokens.length, longest,
  )) {
    found.push(token);
  }
  if (found.join() !== known.tokens.join()) {
    throw new CheckError(`generation: got tokens ${found}; expected ${known.tokens}`);
  }
}
