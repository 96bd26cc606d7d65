// Serves one JavaScript runtime to a Python process: JSON lines in, JSON lines out, tensors as files.
//
//   node serve.mjs BACKEND MODULES [PORT]
//
// BACKEND: node | wasm | browser-wasm | browser-webgpu | directml. With PORT (of this machine's
// loopback) requests and replies go through that socket, else through the standard streams.
//
// Requests: {op: "load", model, options} -> {inputs, outputs, load_ms, device}
//           {op: "run", inputs: {name: {type, dims, file}}, folder} -> {outputs: {name: {...}}}
//           {op: "time", inputs, repeats, warmup} -> {times_ms}
//           {op: "placement"} -> {lines}
//           {op: "profile", inputs, folder} -> {}; the profile of one run lies in the folder
// A request that fails is answered with {error}. Nothing but replies goes to the standard output.

import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { connect } from "node:net";
import { readFile, writeFile } from "node:fs/promises";
import path from "node:path";
import { pathToFileURL } from "node:url";

for (const name of ["log", "info", "warn", "debug"]) console[name] = console.error;

const [backendName, modules, port] = process.argv.slice(2);
// onnxruntime-node 1.30 knows the halves of a tensor as Uint16Array alone; newer Nodes have a type.
if (!backendName.startsWith("browser")) globalThis.Float16Array = undefined;
const require = createRequire(pathToFileURL(path.join(modules, "package.json")));
const file = backendName.startsWith("browser") ? "browser" : "in_node";
const { open } = await import(`./${file}.mjs`);
// Starting can fail (no browser, no adapter): the first request is then answered with why.
const opened = open({ backendName, modules, require });
opened.catch(() => {});

async function readInputs(described) {
  const inputs = {};
  for (const [name, { type, dims, file }] of Object.entries(described)) {
    inputs[name] = { type, dims, bytes: await readFile(file) };
  }
  return inputs;
}

async function writeOutputs(outputs, folder) {
  const described = {};
  for (const [index, [name, { type, dims, bytes }]] of Object.entries(outputs).entries()) {
    const file = `output_${index}.bin`;
    await writeFile(path.join(folder, file), bytes);
    described[name] = { type, dims: dims.map(Number), file };
  }
  return { outputs: described };
}

async function answer(request) {
  const backend = await opened;
  switch (request.op) {
    case "load":
      return backend.load(request.model, request.options ?? {});
    case "run":
      return writeOutputs(await backend.run(await readInputs(request.inputs)), request.folder);
    case "time": {
      const inputs = await readInputs(request.inputs);
      return { times_ms: await backend.time(inputs, request.repeats, request.warmup) };
    }
    case "placement":
      return { lines: await backend.placement() };
    case "profile":
      await backend.profile(await readInputs(request.inputs), request.folder);
      return {};
    default:
      throw new Error(`unknown request ${request.op}`);
  }
}

const stream = port ? connect(Number(port), "127.0.0.1") : process.stdin;
const replies = port ? stream : process.stdout;

for await (const line of createInterface({ input: stream })) {
  let reply;
  try {
    reply = await answer(JSON.parse(line));
  } catch (error) {
    reply = { error: String(error?.message ?? error) };
  }
  replies.write(`${JSON.stringify(reply)}\n`);
}
await opened.then((backend) => backend.close()).catch(() => {});
process.exit(0);
