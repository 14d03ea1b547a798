// Accelerations of n bodies: BS threads, OU bodies each, IU unrolled; through shared memory or not.
#if SOA
#define X(i) px[i]
#define Y(i) py[i]
#define Z(i) pz[i]
#define W(i) pw[i]
#else
#define X(i) p[i].x
#define Y(i) p[i].y
#define Z(i) p[i].z
#define W(i) p[i].w
#endif
extern "C" __global__ void __launch_bounds__(BS)
    k(const float* __restrict__ px, const float* __restrict__ py, const float* __restrict__ pz,
      const float* __restrict__ pw, const float4* __restrict__ p, float* out, int n) {
  int i0 = blockIdx.x * BS * OU + threadIdx.x;
  float x[OU], y[OU], z[OU], ax[OU], ay[OU], az[OU];
#pragma unroll
  for (int o = 0; o < OU; ++o) {
    int i = min(i0 + o * BS, n - 1);
    x[o] = X(i);
    y[o] = Y(i);
    z[o] = Z(i);
    ax[o] = ay[o] = az[o] = 0;
  }
#if SHM
  __shared__ float4 s[BS * SMUL];
  for (int b = 0; b < n; b += BS * SMUL) {
    for (int q = 0; q < SMUL; ++q) {
      int j = b + q * BS + threadIdx.x;
      s[q * BS + threadIdx.x] = make_float4(X(j), Y(j), Z(j), W(j));
    }
    __syncthreads();
#pragma unroll IU
    for (int j = 0; j < BS * SMUL; ++j) {
      float4 r = s[j];
#else
#pragma unroll IU
  for (int j = 0; j < n; ++j) {
    float4 r = make_float4(X(j), Y(j), Z(j), W(j));
#endif
#pragma unroll
      for (int o = 0; o < OU; ++o) {
        float dx = r.x - x[o], dy = r.y - y[o], dz = r.z - z[o];
        float d = dx * dx + dy * dy + dz * dz + 0.01f;
#if RS
        float v = 1.0f / sqrtf(d);
#else
      float v = rsqrtf(d);
#endif
        v = r.w * v * v * v;
        ax[o] += dx * v;
        ay[o] += dy * v;
        az[o] += dz * v;
      }
    }
#if SHM
    __syncthreads();
  }
#endif
#pragma unroll
  for (int o = 0; o < OU; ++o) {
    int i = i0 + o * BS;
    if (i < n) {
      out[3 * i] = ax[o];
      out[3 * i + 1] = ay[o];
      out[3 * i + 2] = az[o];
    }
  }
}
