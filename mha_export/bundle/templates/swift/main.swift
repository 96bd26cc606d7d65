// Run the bundle with ONNX Runtime from Swift (iOS, macOS), package onnxruntime-swift-package-manager.
// On a phone ship model/portable.onnx with model/weights.bin, or model/mobile.ort (bundle --mobile).

import CryptoKit
import Foundation
import OnnxRuntimeBindings

struct CheckError: Error { let reason: String }

func fail(_ reason: String) throws -> Never { throw CheckError(reason: reason) }

let arguments = CommandLine.arguments.dropFirst()
let folder = URL(fileURLWithPath: arguments.first { !$0.hasPrefix("--") } ?? ".")

func bytes(_ name: String) throws -> Data {
    guard let data = try? Data(contentsOf: folder.appendingPathComponent(name)) else {
        try fail("\(name): missing")
    }
    return data
}

func floats(_ data: Data, _ offset: Int, _ count: Int) -> [Float] {
    data.subdata(in: offset..<(offset + 4 * count)).withUnsafeBytes { Array($0.bindMemory(to: Float.self)) }
}

func sha256(_ data: Data) -> String {
    SHA256.hash(data: data).map { String(format: "%02x", $0) }.joined()
}

// The manifest's own hash is that of its bytes with those 64 digits set to zero.
func checkManifest(_ data: Data, _ stated: String) throws {
    guard var text = String(data: data, encoding: .utf8), let place = text.range(of: stated) else {
        try fail("manifest.json: damaged")
    }
    text.replaceSubrange(place, with: String(repeating: "0", count: 64))
    if sha256(Data(text.utf8)) != stated { try fail("manifest.json: changed") }
}

func run() throws {
    let stored = try bytes("manifest.json")
    guard let manifest = try JSONSerialization.jsonObject(with: stored) as? [String: Any],
          let own = manifest["sha256"] as? String,
          let files = manifest["files"] as? [String: [String: Any]],
          let variants = manifest["variants"] as? [[String: Any]],
          let answers = manifest["answers"] as? [[String: Any]]
    else { try fail("manifest.json: damaged") }

    try checkManifest(stored, own)
    if arguments.contains("--check") {
        for (name, stated) in files {
            let found = sha256(try bytes(name))
            if found != stated["sha256"] as? String { try fail("\(name): changed (sha256 \(found))") }
        }
    }

    // The first variant, in the manifest's order, that ONNX Runtime's CPU provider runs.
    let version = ORTVersion() ?? "0"
    let chosen = variants.first { variant in
        (variant["runs_on"] as? [[String: String]] ?? []).contains { place in
            place["runtime"] == "onnxruntime" && place["provider"] == "CPUExecutionProvider"
                && version.compare(place["minimum"]!, options: .numeric) != .orderedAscending
        }
    }
    guard let variant = chosen, let file = variant["file"] as? String else {
        try fail("older or provider: no variant runs on onnxruntime \(version)")
    }
    let environment = try ORTEnv(loggingLevel: .warning)
    let session = try ORTSession(
        env: environment, modelPath: folder.appendingPathComponent(file).path, sessionOptions: nil)

    for known in answers {
        let data = try bytes(known["file"] as! String)
        var inputs: [String: ORTValue] = [:]
        for t in known["inputs"] as! [[String: Any]] {
            let (offset, size) = (t["offset"] as! Int, t["bytes"] as! Int)
            let types: [String: ORTTensorElementDataType] = ["float32": .float, "int64": .int64, "int32": .int32]
            guard let type = types[t["dtype"] as! String] else { try fail("type \(t["dtype"]!) is not handled") }
            let piece = NSMutableData(data: data.subdata(in: offset..<(offset + size)))
            inputs[t["name"] as! String] = try ORTValue(
                tensorData: piece, elementType: type, shape: (t["shape"] as! [Int]).map { NSNumber(value: $0) })
        }
        let outputs = try session.run(
            withInputs: inputs, outputNames: Set(try session.outputNames()), runOptions: nil)
        var worst: Float = 0
        for t in known["outputs"] as! [[String: Any]] {
            guard let value = outputs[t["name"] as! String] else { try fail("\(t["name"]!): missing") }
            let found = try value.tensorData() as Data
            let (count, rows) = (found.count / 4, t["rows"] as! Int)
            let (actual, exact) = (floats(found, 0, count), floats(data, t["offset"] as! Int, count))
            let bound = floats(data, t["bound"] as! Int, rows)
            let coarse = floats(data, t["coarse"] as! Int, rows)
            for i in 0..<count {
                let (error, row) = (actual[i] == exact[i] ? 0 : abs(actual[i] - exact[i]), i / (count / rows))
                if !(error <= coarse[row]) { try fail("answer '\(known["name"]!)': \(t["name"]!) is off by \(error)") }
                worst = max(worst, error / bound[row])
            }
        }
        print("\(known["name"]!): \(worst <= 1 ? "right" : "imprecise"), \(worst) of the bound")
    }
}

do {
    try run()
} catch let error as CheckError {
    FileHandle.standardError.write("FAILED: \(error.reason)\n".data(using: .utf8)!)
    exit(1)
}
