/* d3d12.dll in front of Wine's own, for DirectML.
 *
 * DMLCreateDevice asks the device for the metacommands of its driver. Wine (10.0, vkd3d 1.14) has
 * no more than a stub of that method, which fails, and DirectML gives up. A device without
 * metacommands is legal, so the method is replaced by one that says there are none; everything else
 * is forwarded by the linker (d3d12.def) to a copy of Wine's library, d3d12_wine.dll. */
#define COBJMACROS
#define CINTERFACE
#define INITGUID
#include <windows.h>

#include <d3d12.h>

typedef HRESULT(WINAPI *create_device_fn)(IUnknown *adapter, D3D_FEATURE_LEVEL level, REFIID riid,
                                          void **device);

static HRESULT STDMETHODCALLTYPE no_meta_commands(ID3D12Device5 *device, UINT *count,
                                                  D3D12_META_COMMAND_DESC *descriptions) {
  (void)device;
  (void)descriptions;
  if (count) *count = 0;
  return S_OK;
}

/* The method table is shared by all devices and lies in read-only memory. */
static void replace_method(ID3D12Device5 *device) {
  void *slot = (void *)&device->lpVtbl->EnumerateMetaCommands;
  void *method = (void *)no_meta_commands;
  DWORD protection;
  if (!VirtualProtect(slot, sizeof method, PAGE_READWRITE, &protection)) return;
  CopyMemory(slot, &method, sizeof method);
  VirtualProtect(slot, sizeof method, protection, &protection);
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
    replace_method(device5);
    ID3D12Device5_Release(device5);
  }
  return result;
}
