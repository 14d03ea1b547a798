// Softmax of rows: BX threads a row, BY rows at a time, RP times; in one pass over the row or two.
#if VW == 1
typedef float V;
#elif VW == 2
typedef float2 V;
#else
typedef float4 V;
#endif
__device__ __forceinline__ float red(float v, bool mx, float* s) {
  for (int o = 16; o; o >>= 1) {
    float w = __shfl_xor_sync(0xffffffff, v, o);
    v = mx ? fmaxf(v, w) : v + w;
  }
  if (BX <= 32) return v;
  int w = threadIdx.x / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 0) s[threadIdx.y * 32 + w] = v;
  __syncthreads();
  v = mx ? -1e30f : 0.f;
  for (int i = 0; i < BX / 32; ++i) {
    float u = s[threadIdx.y * 32 + i];
    v = mx ? fmaxf(v, u) : v + u;
  }
  return v;
}
extern "C" __global__ void __launch_bounds__(BX* BY) k(const float* __restrict__ in, float* out, int rows, int n) {
  __shared__ float s[BY * 32];
#if KEEP == 1
  extern __shared__ float keep[];
  float* mine = keep + threadIdx.y * n;
#endif
  for (int r = blockIdx.x * BY * RP + threadIdx.y; r < min(rows, (int)(blockIdx.x + 1) * BY * RP); r += BY) {
    const float* a = in + (size_t)r * n;
    float* o = out + (size_t)r * n;
    float m = -1e30f, z = 0;
#if ONLINE
#pragma unroll UN
    for (int i = threadIdx.x * VW; i < n; i += BX * VW) {
      V v = *(const V*)&a[i];
      float* f = (float*)&v;
      for (int q = 0; q < VW; ++q) {
#if KEEP == 1
        mine[i + q] = f[q];
#endif
        float nm = fmaxf(m, f[q]);
        z = z * __expf(m - nm) + __expf(f[q] - nm);
        m = nm;
      }
    }
    float gm = red(m, true, s);
    z = red(z * __expf(m - gm), false, s);
    m = gm;
#else
#pragma unroll UN
    for (int i = threadIdx.x * VW; i < n; i += BX * VW) {
      V v = *(const V*)&a[i];
      float* f = (float*)&v;
      for (int q = 0; q < VW; ++q) {
#if KEEP == 1
        mine[i + q] = f[q];
#endif
        m = fmaxf(m, f[q]);
      }
    }
    m = red(m, true, s);
#pragma unroll UN
    for (int i = threadIdx.x * VW; i < n; i += BX * VW) {
#if KEEP == 1
      for (int q = 0; q < VW; ++q) z += __expf(mine[i + q] - m);
#else
      V v = *(const V*)&a[i];
      float* f = (float*)&v;
      for (int q = 0; q < VW; ++q) z += __expf(f[q] - m);
#endif
    }
    z = red(z, false, s);
#endif
    float iz = 1.f / z;
#pragma unroll UN
    for (int i = threadIdx.x * VW; i < n; i += BX * VW) {
#if KEEP == 1
      V v;
      float* f = (float*)&v;
      for (int q = 0; q < VW; ++q) f[q] = __expf(mine[i + q] - m) * iz;
#else
      V v = *(const V*)&a[i];
      float* f = (float*)&v;
      for (int q = 0; q < VW; ++q) f[q] = __expf(f[q] - m) * iz;
#endif
      *(V*)&o[i] = v;
    }
  }
}
