// Run the bundle with onnxruntime-node.
//
//   node run.mjs                     the known inputs, timed
//   node run.mjs --check             files, known answers, provider; exit 1 and a name if one is bad
//   node run.mjs --generate 20       a decoder: stream 20 tokens after the known prompt
//   node run.mjs --target portable   this variant, not the first that fits
//   node run.mjs --provider dml      only this provider of the runtime

import { mkdtemp, readFile, readdir, rm } from "node:fs/promises";
import { writeSync } from "node:fs";
import os from "node:os";
import path from "node:path";
import { parseArgs } from "node:util";
import { fileURLToPath } from "node:url";
import {
  CheckError, checkAnswer, checkFiles, checkGeneration, choose, generate, inputsOf, readManifest,
} from "./bundle.mjs";

const BUNDLE = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../..");
const { values: asked } = parseArgs({
  options: {
    check: { type: "boolean", default: false },
    generate: { type: "string" },
    target: { type: "string" },
    provider: { type: "string" },
    bundle: { type: "string", default: BUNDLE },
  },
});
// Not console.log: a program whose output is a pipe may end before that has written.
const say = (text, end = "\n") => writeSync(1, text + end);

async function read(name) {
  try {
    return new Uint8Array(await readFile(path.join(asked.bundle, name)));
  } catch (error) {
    if (error.code === "ENOENT") return null;
    throw error;
  }
}

function sessionOptions(variant, provider) {
  const options = {
    executionProviders: [provider],
    logSeverityLevel: 3,
    extra: { session: { intra_op: { allow_spinning: "0" } } },
  };
  for (const [name, value] of Object.entries(variant.options["onnxruntime-node"] ?? {})) {
    if (name === "enableMemPattern") options[name] = value === "1";
    else if (name === "executionMode") options[name] = value;
    else options.extra.session[name.replace(/^session\./, "")] = value;
  }
  return options;
}

// Attention ran on `provider`: read off ONNX Runtime's profile of one run, the only place that tells.
async function checkPlacement(ort, file, variant, provider, inputs) {
  if (provider === "cpu") return;
  const folder = await mkdtemp(path.join(os.tmpdir(), "placement-"));
  try {
    const options = sessionOptions(variant, provider);
    options.extra.ep = { dml: { disable_graph_fusion: "1" } }; // else it is one node of any name
    const session = await ort.InferenceSession.create(file, {
      ...options, enableProfiling: true, profileFilePrefix: path.join(folder, "run"),
    });
    await session.run(inputs);
    session.endProfiling();
    await session.release();
    const [name] = await readdir(folder);
    const attention = new Set(variant.attention_nodes);
    let found = 0;
    for (const { args, name: event } of JSON.parse(await readFile(path.join(folder, name), "utf8"))) {
      const node = event.replace(/_kernel_time$/, "");
      if (!args?.provider || !attention.has(node)) continue;
      if (!args.provider.toLowerCase().startsWith(provider)) {
        throw new CheckError(`provider: ${node} ran on ${args.provider}, not ${provider}`);
      }
      found += 1;
    }
    if (!found) throw new CheckError(`provider: the profile names no attention node`);
    say(`${found} attention nodes on ${provider}`);
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

async function main() {
  const manifest = await readManifest(read);
  if (asked.check) await checkFiles(read, manifest);
  const ort = await import("onnxruntime-node");
  const version = ort.env.versions.node;
  const all = ort.listSupportedBackends().map((backend) => backend.name);
  const providers = asked.provider ? all.filter((name) => name === asked.provider) : ["cpu"];
  if (!asked.provider && asked.target) providers.push(...all.filter((name) => name !== "cpu"));
  if (asked.provider && !providers.length) {
    throw new CheckError(`provider: ${asked.provider} is not in this build; it has ${all.join(", ")}`);
  }
  const { variant, provider } = choose(
    manifest, "onnxruntime-node", version, providers, asked.target ?? null,
  );
  const file = path.join(asked.bundle, variant.file);
  const session = await ort.InferenceSession.create(file, sessionOptions(variant, provider));
  say(`${variant.target} on ${provider}, onnxruntime-node ${version}`);
  if (asked.generate) {
    if (!manifest.generation) throw new CheckError("this model does not generate tokens");
    const { prompt } = manifest.generation;
    const count = Number(asked.generate);
    for await (const token of generate(
      ort, session, manifest, prompt, count, prompt.length + count,
    )) {
      say(String(token), " ");
    }
    say("");
    return;
  }
  for (const known of manifest.answers) {
    const bytes = await read(known.file);
    const inputs = inputsOf(ort, bytes, known);
    const factor = await checkAnswer(bytes, known, await session.run(inputs));
    const started = performance.now();
    await session.run(inputs);
    const took = (performance.now() - started).toFixed(1);
    const verdict = factor <= 1 ? "right" : "imprecise";
    say(`${known.name}: ${verdict}, ${factor.toFixed(2)} of the bound, ${took} ms`);
  }
  if (asked.check) {
    await checkGeneration(ort, session, manifest);
    const [first] = manifest.answers;
    const inputs = inputsOf(ort, await read(first.file), first);
    await checkPlacement(ort, file, variant, provider, inputs);
    say("all checks passed");
  }
}

try {
  await main();
  process.exit(0);
} catch (error) {
  writeSync(2, `FAILED: ${error instanceof CheckError ? "" : `${error.name}: `}${error.message}\n`);
  process.exit(1);
}
