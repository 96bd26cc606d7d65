// Run the bundle with OpenVINO: openvino_app FOLDER [--check] [--generate N] [--target NAME]

#include <openvino/openvino.hpp>

#include "run.hpp"

namespace {

ov::element::Type type_of(const std::string& dtype) {
  static const std::map<std::string, ov::element::Type> types = {
      {"float32", ov::element::f32}, {"float16", ov::element::f16}, {"bfloat16", ov::element::bf16},
      {"float64", ov::element::f64}, {"int64", ov::element::i64},   {"int32", ov::element::i32},
      {"uint8", ov::element::u8},    {"bool", ov::element::boolean}};
  const auto found = types.find(dtype);
  if (found == types.end()) throw bundle::CheckError("element type " + dtype + " is not handled");
  return found->second;
}

std::string name_of(const ov::element::Type& type) {
  for (const char* name : {"float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"})
    if (type_of(name) == type) return name;
  throw bundle::CheckError("element type " + type.get_type_name() + " is not handled");
}

class Session {
 public:
  Session(ov::CompiledModel compiled)
      : compiled_(std::move(compiled)), request_(compiled_.create_infer_request()) {}

  std::map<std::string, bundle::Output> run(const std::vector<bundle::Feed>& feeds) {
    for (const bundle::Feed& feed : feeds) {
      ov::Shape shape(feed.shape.begin(), feed.shape.end());
      ov::Tensor tensor(type_of(feed.dtype), shape);
      if (!feed.bytes.empty()) std::memcpy(tensor.data(), feed.bytes.data(), feed.bytes.size());
      request_.set_tensor(feed.name, tensor);
    }
    request_.infer();
    std::map<std::string, bundle::Output> outputs;
    for (const auto& port : compiled_.outputs()) {
      const ov::Tensor tensor = request_.get_tensor(port);
      const ov::Shape shape = tensor.get_shape();
      const bundle::Output output{tensor.data(), name_of(tensor.get_element_type()),
                                  std::vector<int64_t>(shape.begin(), shape.end())};
      for (const std::string& name : port.get_names()) outputs[name] = output;
    }
    return outputs;
  }

 private:
  ov::CompiledModel compiled_;
  ov::InferRequest request_;
};

void run(const bundle::Asked& asked) {
  const bundle::Json manifest = bundle::read_manifest(asked.folder);
  if (asked.check) bundle::check_files(asked.folder, manifest);
  ov::Core core;
  const std::string version = ov::get_openvino_version().buildNumber;
  const auto [variant, device] =
      bundle::choose(manifest, "openvino", version, core.get_available_devices(), asked.target);
  ov::AnyMap options;
  for (const auto& [name, value] : (*variant)["options"].at("openvino").object)
    options[name] = value.text;
  ov::CompiledModel compiled =
      core.compile_model(asked.folder + "/" + (*variant)["file"].text, device, options);
  for (const std::string& ran : compiled.get_property(ov::execution_devices))
    if (ran != device) throw bundle::CheckError("provider: runs on " + ran + ", not " + device);
  std::printf("%s on %s, openvino %s\n", (*variant)["target"].text.c_str(), device.c_str(),
              version.c_str());
  Session session(compiled);
  bundle::work(session, manifest, asked);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(bundle::asked_of(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    return 1;
  }
}
