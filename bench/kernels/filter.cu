// A filter of FW x FH over an image: BX x BY threads, TX x TY pixels each, through shared memory or not.
#define FW 9
#define FH 9
#define IW (BX * TX + FW - 1)
#define IH (BY * TY + FH - 1)
#define PADX ((PAD && (IW % 32) != 0) ? (32 - (BX % 32)) : 0)
__constant__ float f[FH * FW];
extern "C" __global__ void __launch_bounds__(BX* BY) k(const float* __restrict__ in, float* out, int w, int h) {
  int x0 = blockIdx.x * BX * TX, y0 = blockIdx.y * BY * TY;
#if SHM
  __shared__ float s[IH][IW + PADX];
  for (int y = threadIdx.y; y < IH; y += BY)
    for (int x = threadIdx.x; x < IW; x += BX) {
      int gx = min(x0 + x, w + FW - 2), gy = min(y0 + y, h + FH - 2);
      s[y][x] = in[(size_t)gy * (w + FW - 1) + gx];
    }
  __syncthreads();
#endif
  float acc[TY][TX];
#pragma unroll
  for (int j = 0; j < TY; ++j)
#pragma unroll
    for (int i = 0; i < TX; ++i) acc[j][i] = 0;
#if UF
#pragma unroll
#else
#pragma unroll 1
#endif
  for (int b = 0; b < FH; ++b)
#pragma unroll
    for (int a = 0; a < FW; ++a)
#pragma unroll
      for (int j = 0; j < TY; ++j)
#pragma unroll
        for (int i = 0; i < TX; ++i) {
#if SHM
          acc[j][i] += f[b * FW + a] * s[threadIdx.y + j * BY + b][threadIdx.x + i * BX + a];
#else
          int gx = min(x0 + (int)threadIdx.x + i * BX + a, w + FW - 2),
              gy = min(y0 + (int)threadIdx.y + j * BY + b, h + FH - 2);
          acc[j][i] += f[b * FW + a] * in[(size_t)gy * (w + FW - 1) + gx];
#endif
        }
#pragma unroll
  for (int j = 0; j < TY; ++j)
#pragma unroll
    for (int i = 0; i < TX; ++i) {
      int gx = x0 + threadIdx.x + i * BX, gy = y0 + threadIdx.y + j * BY;
      if (gx < w && gy < h) out[(size_t)gy * w + gx] = acc[j][i];
    }
}
