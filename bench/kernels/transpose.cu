// A transposed matrix: tiles of TX, BX x BY threads, through shared memory or not.
typedef float T;
extern "C" __global__ void __launch_bounds__(BX* BY) k(const T* __restrict__ in, T* out, int w, int h) {
#if SHM
  __shared__ T s[TX][TX + PAD];
  int bx = blockIdx.x, by = blockIdx.y;
#if DIAG
  bx = (blockIdx.x + blockIdx.y) % gridDim.x;
#endif
  for (int y = threadIdx.y; y < TX; y += BY * UN)
#pragma unroll
    for (int u = 0; u < UN; ++u)
      for (int x = threadIdx.x; x < TX; x += BX)
        if (y + u * BY < TX) s[y + u * BY][x] = in[(size_t)(by * TX + y + u * BY) * w + bx * TX + x];
  __syncthreads();
  for (int y = threadIdx.y; y < TX; y += BY * UN)
#pragma unroll
    for (int u = 0; u < UN; ++u)
      for (int x = threadIdx.x; x < TX; x += BX)
        if (y + u * BY < TX) out[(size_t)(bx * TX + y + u * BY) * h + by * TX + x] = s[x][y + u * BY];
#else
  int bx = blockIdx.x, by = blockIdx.y;
#if DIAG
  bx = (blockIdx.x + blockIdx.y) % gridDim.x;
#endif
  for (int y = threadIdx.y; y < TX; y += BY * UN)
#pragma unroll
    for (int u = 0; u < UN; ++u)
      for (int x = threadIdx.x; x < TX; x += BX)
        if (y + u * BY < TX)
          out[(size_t)(bx * TX + x) * h + by * TX + y + u * BY] = in[(size_t)(by * TX + y + u * BY) * w + bx * TX + x];
#endif
}
