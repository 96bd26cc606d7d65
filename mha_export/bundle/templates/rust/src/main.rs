// Run the bundle with ONNX Runtime from Rust: cargo run -- ../.. --check

use std::{error::Error, fs, path::Path, path::PathBuf};

use ort::{session::Session, value::DynValue, value::Tensor};
use serde_json::Value;
use sha2::{Digest, Sha256};

type Outcome<T> = Result<T, Box<dyn Error>>;

fn read(folder: &Path, name: &str) -> Outcome<Vec<u8>> {
    fs::read(folder.join(name)).map_err(|_| format!("{name}: missing").into())
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or("")
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

// Its own hash is that of its bytes with those 64 digits set to zero.
fn read_manifest(folder: &Path) -> Outcome<Value> {
    let data = String::from_utf8(read(folder, "manifest.json")?)?;
    let manifest: Value =
        serde_json::from_str(&data).map_err(|e| format!("manifest.json: damaged ({e})"))?;
    let stated = text(&manifest, "sha256");
    if sha256(data.replacen(stated, &"0".repeat(64), 1).as_bytes()) != stated {
        return Err("manifest.json: changed (its sha256 is not the one it states)".into());
    }
    Ok(manifest)
}

fn check_files(folder: &Path, manifest: &Value) -> Outcome<()> {
    for (name, stated) in manifest["files"].as_object().ok_or("manifest.json: damaged")? {
        let found = sha256(&read(folder, name)?);
        if found != text(stated, "sha256") {
            return Err(format!("{name}: changed (sha256 {found})").into());
        }
    }
    Ok(())
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

// The first variant, in the manifest's order, that `runtime` can run; and the provider.
fn choose<'a>(
    manifest: &'a Value, runtime: &str, version: &str, providers: &[&str],
) -> Outcome<(&'a Value, &'a str)> {
    let mut closest = (3, String::from("the bundle holds no variant"));
    for variant in manifest["variants"].as_array().ok_or("manifest.json: damaged")? {
        let places = variant["runs_on"].as_array().ok_or("manifest.json: damaged")?;
        let own: Vec<_> = places.iter().filter(|p| text(p, "runtime") == runtime).collect();
        let here: Vec<_> = own.iter().filter(|p| providers.contains(&text(p, "provider"))).collect();
        if let Some(fit) = here.iter().find(|p| numbers(version) >= numbers(text(p, "minimum"))) {
            return Ok((variant, text(fit, "provider")));
        }
        let name = text(variant, "target");
        let reason = match (here.first(), own.first()) {
            (Some(p), _) => (0, format!("older: {name} needs {runtime} {}", text(p, "minimum"))),
            (_, Some(p)) => (1, format!("provider: {name} needs {}", text(p, "provider"))),
            _ => (2, format!("runtime: {name} is not for {runtime}")),
        };
        if reason.0 < closest.0 {
            closest = reason;
        }
    }
    Err(closest.1.into())
}

fn floats(bytes: &[u8], offset: &Value, count: usize) -> Vec<f32> {
    let start = offset.as_u64().unwrap_or(0) as usize;
    bytes[start..start + 4 * count]
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

fn tensor(t: &Value, bytes: &[u8]) -> Outcome<DynValue> {
    let start = t["offset"].as_u64().unwrap_or(0) as usize;
    let piece = &bytes[start..start + t["bytes"].as_u64().unwrap_or(0) as usize];
    let shape: Vec<i64> = t["shape"].as_array().unwrap().iter().filter_map(Value::as_i64).collect();
    Ok(match text(t, "dtype") {
        "int64" => {
            let data: Vec<i64> =
                piece.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
            Tensor::from_array((shape, data))?.into_dyn()
        }
        "bool" => {
            let data: Vec<bool> = piece.iter().map(|b| *b != 0).collect();
            Tensor::from_array((shape, data))?.into_dyn()
        }
        "float32" => {
            let data = floats(piece, &Value::from(0), piece.len() / 4);
            Tensor::from_array((shape, data))?.into_dyn()
        }
        other => return Err(format!("element type {other} is not handled").into()),
    })
}

fn run() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let folder = PathBuf::from(words.iter().find(|w| !w.starts_with("--")).map_or(".", |w| w));
    let manifest = read_manifest(&folder)?;
    if words.iter().any(|w| w == "--check") {
        check_files(&folder, &manifest)?;
    }
    // The oldest version that this release of the `ort` crate accepts.
    let version = format!("1.{}.0", ort::MINOR_VERSION);
    let (variant, provider) =
        choose(&manifest, "onnxruntime", &version, &["CPUExecutionProvider"])?;
    let mut session = Session::builder()?.commit_from_file(folder.join(text(variant, "file")))?;
    println!("{} on {provider}, onnxruntime {version} or later", text(variant, "target"));
    for known in manifest["answers"].as_array().unwrap() {
        let bytes = read(&folder, text(known, "file"))?;
        let mut inputs: Vec<(String, DynValue)> = Vec::new();
        for t in known["inputs"].as_array().unwrap() {
            inputs.push((text(t, "name").to_string(), tensor(t, &bytes)?));
        }
        let outputs = session.run(inputs)?;
        let mut worst = 0f32;
        for t in known["outputs"].as_array().unwrap() {
            let (_, found) = outputs[text(t, "name")].try_extract_tensor::<f32>()?;
            let rows = t["rows"].as_u64().unwrap() as usize;
            let exact = floats(&bytes, &t["offset"], found.len());
            let (bound, coarse) = (floats(&bytes, &t["bound"], rows), floats(&bytes, &t["coarse"], rows));
            for (i, (a, b)) in found.iter().zip(&exact).enumerate() {
                let (error, row) = (if a == b { 0.0 } else { (a - b).abs() }, i / (found.len() / rows));
                if !(error <= coarse[row]) {
                    return Err(format!("answer '{}': {} is off by {error}", text(known, "name"), text(t, "name")).into());
                }
                worst = worst.max(error / bound[row]);
            }
        }
        let verdict = if worst <= 1.0 { "right" } else { "imprecise" };
        println!("{}: {verdict}, {worst:.2} of the bound", text(known, "name"));
    }
    println!("known answers are right");
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("FAILED: {error}");
        std::process::exit(1);
    }
}
