// Several steps of a five-point stencil in one pass: BX x BY threads, TX x TY cells each, TF steps.
#define TW (BX * TX)
#define TH (BY * TY)
#define SW (TW + 2 * TF)
#define SH (TH + 2 * TF)
extern "C" __global__ void __launch_bounds__(BX* BY)
    k(const float* __restrict__ in, const float* __restrict__ power, float* out, int n) {
  __shared__ float s[2][SH][SW];
#if SHPOW
  __shared__ float p[SH][SW];
#endif
  int x0 = blockIdx.x * TW - TF, y0 = blockIdx.y * TH - TF;
  for (int y = threadIdx.y; y < SH; y += BY)
    for (int x = threadIdx.x; x < SW; x += BX) {
      int gx = min(max(x0 + x, 0), n - 1), gy = min(max(y0 + y, 0), n - 1);
      s[0][y][x] = in[(size_t)gy * n + gx];
#if SHPOW
      p[y][x] = power[(size_t)gy * n + gx];
#endif
    }
  __syncthreads();
  int c = 0;
#pragma unroll 1
  for (int t = 1; t <= TF; ++t) {
    for (int y = threadIdx.y + t; y < SH - t; y += BY)
      for (int x = threadIdx.x + t; x < SW - t; x += BX) {
#if SHPOW
        float pw = p[y][x];
#else
        float pw = power[(size_t)min(max(y0 + y, 0), n - 1) * n + min(max(x0 + x, 0), n - 1)];
#endif
        float v = s[c][y][x];
        s[1 - c][y][x] = v + 0.1f * (pw + (s[c][y + 1][x] + s[c][y - 1][x] - 2 * v) * 0.3f +
                                     (s[c][y][x + 1] + s[c][y][x - 1] - 2 * v) * 0.2f + (80.f - v) * 0.01f);
      }
    c = 1 - c;
    __syncthreads();
  }
  for (int y = threadIdx.y; y < TH; y += BY)
    for (int x = threadIdx.x; x < TW; x += BX) {
      int gx = x0 + TF + x, gy = y0 + TF + y;
      if (gx < n && gy < n) out[(size_t)gy * n + gx] = s[c][y + TF][x + TF];
    }
}
