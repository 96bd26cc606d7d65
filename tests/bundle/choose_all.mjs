// Print what the bundle's chooser gives for every row of a table: node choose_all.mjs CHOOSER MANIFEST CASES
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [chooser, manifestFile, cases] = process.argv.slice(2);
const { choose } = await import(pathToFileURL(chooser));
const manifest = JSON.parse(readFileSync(manifestFile, "utf8"));
for (const line of readFileSync(cases, "utf8").trim().split("\n").slice(1)) {
  const [, runtime, version, offered, want] = line.split("\t");
  const providers = offered === "-" ? [] : offered.split(",");
  try {
    const { variant, provider } = choose(
      manifest, runtime, version, providers, want === "-" ? null : want,
    );
    console.log(`${variant.target}/${provider}`);
  } catch (error) {
    console.log(`!${error.message.split(":")[0]}`);
  }
}
