// Run the bundle with ONNX Runtime: onnxruntime_app FOLDER [--check] [--generate N] [--target NAME]

#include <onnxruntime_cxx_api.h>

#include "run.hpp"

namespace {

const std::map<std::string, ONNXTensorElementDataType> TYPES = {
    {"float32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
    {"bfloat16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16},
    {"float64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
    {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {"uint8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
    {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL}};

std::string name_of(ONNXTensorElementDataType type) {
  for (const auto& item : TYPES)
    if (item.second == type) return item.first;
  throw bundle::CheckError("element type " + std::to_string(type) + " is not handled");
}

class Session {
 public:
  Session(Ort::Env& env, const std::string& file, const Ort::SessionOptions& options)
      : session_(env, std::basic_string<ORTCHAR_T>(file.begin(), file.end()).c_str(), options) {
    Ort::AllocatorWithDefaultOptions allocator;
    for (size_t i = 0; i < session_.GetOutputCount(); ++i)
      outputs_.push_back(session_.GetOutputNameAllocated(i, allocator).get());
  }

  std::map<std::string, bundle::Output> run(const std::vector<bundle::Feed>& feeds) {
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    std::vector<const char*> names, wanted;
    std::vector<Ort::Value> values;
    for (const bundle::Feed& feed : feeds) {
      names.push_back(feed.name.c_str());
      values.push_back(Ort::Value::CreateTensor(memory, const_cast<char*>(feed.bytes.data()),
                                                feed.bytes.size(), feed.shape.data(),
                                                feed.shape.size(), TYPES.at(feed.dtype)));
    }
    for (const std::string& name : outputs_) wanted.push_back(name.c_str());
    results_ = session_.Run(Ort::RunOptions{nullptr}, names.data(), values.data(), values.size(),
                            wanted.data(), wanted.size());
    std::map<std::string, bundle::Output> outputs;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const auto info = results_[i].GetTensorTypeAndShapeInfo();
      outputs[outputs_[i]] = {results_[i].GetTensorRawData(), name_of(info.GetElementType()),
                              info.GetShape()};
    }
    return outputs;
  }

 private:
  Ort::Session session_;
  std::vector<std::string> outputs_;
  std::vector<Ort::Value> results_;
};

void run(const bundle::Asked& asked) {
  const bundle::Json manifest = bundle::read_manifest(asked.folder);
  if (asked.check) bundle::check_files(asked.folder, manifest);
  const std::string version = Ort::GetVersionString();
  // A GPU provider is asked for with --target and then appended: AppendExecutionProvider_CUDA, ...
  const auto [variant, provider] =
      bundle::choose(manifest, "onnxruntime", version, {"CPUExecutionProvider"}, asked.target);
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "bundle");
  Ort::SessionOptions options;
  options.AddConfigEntry("session.intra_op.allow_spinning", "0");
  std::printf("%s on %s, onnxruntime %s\n", (*variant)["target"].text.c_str(), provider.c_str(),
              version.c_str());
  Session session(env, asked.folder + "/" + (*variant)["file"].text, options);
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
