// Tensors as bytes and back. Runs in Node and in a page, so it imports nothing.

const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  float16: globalThis.Float16Array ?? Uint16Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  bool: Uint8Array,
};

export function toTensor(ort, { type, dims, bytes }) {
  const kind = ARRAYS[type];
  if (!kind) throw new Error(`onnxruntime's JavaScript API has no element type ${type}`);
  const copy = new Uint8Array(bytes).slice().buffer; // aligned, and owned by the tensor
  return new ort.Tensor(type, new kind(copy), dims);
}

export function toFeeds(ort, inputs) {
  return Object.fromEntries(Object.entries(inputs).map(([name, x]) => [name, toTensor(ort, x)]));
}

export async function toBytes(results) {
  const outputs = {};
  for (const [name, tensor] of Object.entries(results)) {
    const data = await tensor.getData();
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    outputs[name] = { type: tensor.type, dims: Array.from(tensor.dims), bytes };
  }
  return outputs;
}

export async function timeRuns(session, feeds, repeats, warmup) {
  const times = [];
  for (let turn = 0; turn < warmup + repeats; turn += 1) {
    const started = performance.now();
    const results = await session.run(feeds);
    // Reading a result back is what waits for a device.
    for (const tensor of Object.values(results)) await tensor.getData();
    if (turn >= warmup) times.push(performance.now() - started);
  }
  return times;
}
