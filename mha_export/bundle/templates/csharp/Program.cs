// Run the bundle with ONNX Runtime from C#: dotnet run -- ../..
// Packages: Microsoft.ML.OnnxRuntime (CPU) or Microsoft.ML.OnnxRuntime.DirectML (Windows, any GPU).

using System.Runtime.InteropServices;
using System.Security.Cryptography;
using System.Text;
using System.Text.Json;
using System.Text.Json.Nodes;
using Microsoft.ML.OnnxRuntime;

var folder = args.FirstOrDefault(a => !a.StartsWith("--")) ?? ".";
var manifest = ReadManifest();

if (args.Contains("--check"))
    foreach (var (name, stated) in manifest["files"]!.AsObject())
    {
        var path = Path.Combine(folder, name);
        if (!File.Exists(path)) Fail($"{name}: missing");
        using var stream = File.OpenRead(path);
        var found = Hex(SHA256.HashData(stream));
        if (found != (string)stated!["sha256"]!) Fail($"{name}: changed (sha256 {found})");
    }

var version = OrtEnv.Instance().GetVersionString();
var providers = OrtEnv.Instance().GetAvailableProviders();
var (variant, provider) = Choose("onnxruntime", version, providers);
var options = new SessionOptions();
if (provider == "DmlExecutionProvider")
{
    options.EnableMemoryPattern = false;
    options.ExecutionMode = ExecutionMode.ORT_SEQUENTIAL;
    options.AppendExecutionProvider_DML(0);
}
using var session = new InferenceSession(Path.Combine(folder, (string)variant["file"]!), options);
Console.WriteLine($"{variant["target"]} on {provider}, onnxruntime {version}");

foreach (var known in manifest["answers"]!.AsArray())
{
    var bytes = File.ReadAllBytes(Path.Combine(folder, (string)known!["file"]!));
    var inputs = known["inputs"]!.AsArray().ToDictionary(t => (string)t!["name"]!, t => Tensor(t!, bytes));
    using var outputs = session.Run(new RunOptions(), inputs, session.OutputNames);
    var worst = 0.0;
    foreach (var t in known["outputs"]!.AsArray())
    {
        // Outputs of type float; other types are read with GetTensorDataAsSpan of theirs.
        var found = outputs[session.OutputNames.ToList().IndexOf((string)t!["name"]!)].GetTensorDataAsSpan<float>();
        var exact = Floats(bytes, (int)t["offset"]!, found.Length);
        int rows = (int)t["rows"]!, width = found.Length / rows;
        var bound = Floats(bytes, (int)t["bound"]!, rows);
        var coarse = Floats(bytes, (int)t["coarse"]!, rows);
        for (var i = 0; i < found.Length; i++)
        {
            var error = found[i].Equals(exact[i]) ? 0 : Math.Abs((double)found[i] - exact[i]);
            if (!(error <= coarse[i / width])) Fail($"answer '{known["name"]}': {t["name"]} is off by {error}");
            worst = Math.Max(worst, error / bound[i / width]);
        }
    }
    Console.WriteLine($"{known["name"]}: {(worst <= 1 ? "right" : "imprecise")}, {worst:F2} of the bound");
}
return;

// Its own hash is that of its bytes with those 64 digits set to zero.
JsonNode ReadManifest()
{
    var path = Path.Combine(folder, "manifest.json");
    if (!File.Exists(path)) Fail("manifest.json: missing");
    var text = File.ReadAllText(path);
    try
    {
        var document = JsonNode.Parse(text)!;
        var stated = (string?)document["sha256"] ?? "";
        var at = text.IndexOf(stated, StringComparison.Ordinal);
        var blank = text.Remove(at, stated.Length).Insert(at, new string('0', 64));
        if (Hex(SHA256.HashData(Encoding.UTF8.GetBytes(blank))) != stated) Fail("manifest.json: changed");
        return document;
    }
    catch (JsonException error)
    {
        Fail($"manifest.json: damaged ({error.Message})");
        throw;
    }
}

// The first variant, in the manifest's order, that `runtime` can run; and the provider.
(JsonNode, string) Choose(string runtime, string version, string[] providers)
{
    var (closest, reason) = (3, "");
    foreach (var variant in manifest["variants"]!.AsArray())
    {
        var own = variant!["runs_on"]!.AsArray().Where(p => (string)p!["runtime"]! == runtime).ToList();
        var here = own.Where(p => providers.Contains((string)p!["provider"]!)).ToList();
        var fit = here.Find(p => Version.Parse(version) >= Version.Parse((string)p!["minimum"]!));
        if (fit != null) return (variant, (string)fit["provider"]!);
        var (rank, words) = here.Count > 0 ? (0, $"older: {variant["target"]} needs {here[0]!["minimum"]}")
            : own.Count > 0 ? (1, $"provider: {variant["target"]} needs {own[0]!["provider"]}")
            : (2, $"runtime: {variant["target"]} is not for {runtime}");
        if (rank < closest) (closest, reason) = (rank, words);
    }
    Fail(reason);
    throw new InvalidOperationException();
}

static OrtValue Tensor(JsonNode t, byte[] bytes)
{
    var shape = t["shape"]!.AsArray().Select(n => (long)n!).ToArray();
    var piece = bytes.AsSpan((int)t["offset"]!, (int)t["bytes"]!);
    return (string)t["dtype"]! switch
    {
        "int64" => OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, long>(piece).ToArray(), shape),
        "int32" => OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, int>(piece).ToArray(), shape),
        "float32" => OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, float>(piece).ToArray(), shape),
        "bool" => OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, bool>(piece).ToArray(), shape),
        var other => throw new NotSupportedException(other),
    };
}

static string Hex(byte[] hash) => Convert.ToHexString(hash).ToLowerInvariant();

static float[] Floats(byte[] bytes, int offset, int count) =>
    MemoryMarshal.Cast<byte, float>(bytes.AsSpan(offset, 4 * count)).ToArray();

static void Fail(string reason)
{
    Console.Error.WriteLine($"FAILED: {reason}");
    Environment.Exit(1);
}
