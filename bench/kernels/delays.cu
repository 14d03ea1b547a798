// Sums over channels with a delay each, as in dedispersion: BX x BY threads, TX x TY sums each.
extern "C" __global__ void __launch_bounds__(BX* BY)
    k(const float* __restrict__ in, float* out, const float* __restrict__ delay, int samples, int padded, int dms,
      int channels) {
  int s0 = blockIdx.x * BX * TX + threadIdx.x * (SX ? 1 : TX), d0 = blockIdx.y * BY * TY + threadIdx.y * (SY ? 1 : TY);
  float acc[TY][TX];
#pragma unroll
  for (int j = 0; j < TY; ++j)
#pragma unroll
    for (int i = 0; i < TX; ++i) acc[j][i] = 0;
#pragma unroll UC
  for (int c = 0; c < channels; ++c) {
    float dc = delay[c];
#pragma unroll
    for (int j = 0; j < TY; ++j) {
      int sh = (int)(dc * (d0 + j * (SY ? BY : 1)));
#pragma unroll
      for (int i = 0; i < TX; ++i) acc[j][i] += in[(size_t)c * padded + s0 + i * (SX ? BX : 1) + sh];
    }
  }
#pragma unroll
  for (int j = 0; j < TY; ++j)
#pragma unroll
    for (int i = 0; i < TX; ++i) {
      int d = d0 + j * (SY ? BY : 1), s = s0 + i * (SX ? BX : 1);
      if (d < dms && s < samples) out[(size_t)d * samples + s] = acc[j][i];
    }
}
