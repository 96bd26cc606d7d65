/* d3d12.dll in front of Wine's own, for DirectML.
 *
 * Two methods of the device are replaced; everything else is forwarded by the linker (d3d12.def) to a
 * copy of Wine's library, d3d12_wine.dll.
 *
 * EnumerateMetaCommands. DMLCreateDevice asks the device for the metacommands of its driver. Wine
 * (10.0, vkd3d 1.14) has no more than a stub of that method, which fails, and DirectML gives up. A
 * device without metacommands is legal: the answer is that there are none.
 *
 * CheckFeatureSupport. Wine says that its highest shader model is 5.1, and all the same that shaders
 * have 64-bit integers and wave operations, which came with model 6. DirectML believes it and hands
 * over shaders of model 6 (a Cast from int64), which Wine can't read. They are taken back. */
#define COBJMACROS
#define CINTERFACE
#define INITGUID
#include <windows.h>

#include <d3d12.h>

typedef HRESULT(WINAPI *create_device_fn)(IUnknown *adapter, D3D_FEATURE_LEVEL level, REFIID riid,
                                          void **device);
typedef HRESULT(STDMETHODCALLTYPE *check_fn)(ID3D12Device5 *device, D3D12_FEATURE feature,
                                             void *data, UINT size);

static check_fn wine_check_feature_support;

static HRESULT STDMETHODCALLTYPE no_meta_commands(ID3D12Device5 *device, UINT *count,
                                                  D3D12_META_COMMAND_DESC *descriptions) {
  (void)device;
  (void)descriptions;
  if (count) *count = 0;
  return S_OK;
}

static HRESULT STDMETHODCALLTYPE check_feature_support(ID3D12Device5 *device, D3D12_FEATURE feature,
                                                       void *data, UINT size) {
  HRESULT result = wine_check_feature_support(device, feature, data, size);
  if (SUCCEEDED(result) && feature == D3D12_FEATURE_D3D12_OPTIONS1) {
    D3D12_FEATURE_DATA_D3D12_OPTIONS1 *options = data;
    options->WaveOps = FALSE;
    options->Int64ShaderOps = FALSE;
  }
  return result;
}

/* The method table is shared by all devices and lies in read-only memory. */
static void replace_method(void *slot, void *method) {
  DWORD protection;
  if (!VirtualProtect(slot, sizeof method, PAGE_READWRITE, &protection)) return;
  CopyMemory(slot, &method, sizeof method);
  VirtualProtect(slot, sizeof method, protection, &protection);
}

static void replace_methods(ID3D12Device5 *device) {
  replace_method((void *)&device->lpVtbl->EnumerateMetaCommands, (void *)no_meta_commands);
  if (wine_check_feature_support) return; /* of an earlier device */
  wine_check_feature_support = device->lpVtbl->CheckFeatureSupport;
  replace_method((void *)&device->lpVtbl->CheckFeatureSupport, (void *)check_feature_support);
}

HRESULT WINAPI D3D12CreateDevice(IUnknown *adapter, D3D_FEATURE_LEVEL level, REFIID riid,
                                 void **device) {
  HMODULE wine = LoadLibraryW(L"d3d12_wine.dll");
  create_device_fn create =
      wine ? (create_device_fn)(void *)GetProcAddress(wine, "D3D12CreateDevice") : NULL;
  ID3D12Device5 *device5;
  HRESULT result;

  if (!create) return E_FAIL;
  result = create(adapter, level, riid, device);
  /* Without a place to put it, the call only asks whether a device could be made. */
  if (FAILED(result) || !device || !*device) return result;
  if (SUCCEEDED(IUnknown_QueryInterface((IUnknown *)*device, &IID_ID3D12Device5,
                                        (void **)&device5))) {
    replace_methods(device5);
    ID3D12Device5_Release(device5);
  }
  return result;
}
