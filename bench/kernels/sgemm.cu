// C = A B in single precision; A is K x M and B is K x N. MWG x NWG x KWG a block, MD x ND threads.
#define TM (MWG / MD)
#define TN (NWG / ND)
#define NT (MD * ND)
#if VW == 1
typedef float V;
#elif VW == 2
typedef float2 V;
#else
typedef float4 V;
#endif
extern "C" __global__ void __launch_bounds__(NT)
    k(const float* __restrict__ A, const float* __restrict__ B, float* C, int M, int N, int K) {
  // A is stored K x M, B is K x N
  __shared__ __align__(16) float a[KWG][MWG];
  __shared__ __align__(16) float b[KWG][NWG];
  int tid = threadIdx.x, tm = tid % MD, tn = tid / MD;
  int m0 = blockIdx.x * MWG, n0 = blockIdx.y * NWG;
  float acc[TM][TN];
  for (int i = 0; i < TM; ++i)
    for (int j = 0; j < TN; ++j) acc[i][j] = 0;
  for (int k0 = 0; k0 < K; k0 += KWG) {
    for (int i = tid; i < KWG * MWG / VW; i += NT) {
      int r = i / (MWG / VW), q = i % (MWG / VW);
      *(V*)&a[r][q * VW] = *(const V*)&A[(size_t)(k0 + r) * M + m0 + q * VW];
    }
    for (int i = tid; i < KWG * NWG / VW; i += NT) {
      int r = i / (NWG / VW), q = i % (NWG / VW);
      *(V*)&b[r][q * VW] = *(const V*)&B[(size_t)(k0 + r) * N + n0 + q * VW];
    }
    __syncthreads();
#pragma unroll KU
    for (int kk = 0; kk < KWG; ++kk) {
      float ra[TM], rb[TN];
#pragma unroll
      for (int i = 0; i < TM; ++i) ra[i] = a[kk][STRM ? tm + i * MD : tm * TM + i];
#pragma unroll
      for (int j = 0; j < TN; ++j) rb[j] = b[kk][STRN ? tn + j * ND : tn * TN + j];
#pragma unroll
      for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] += ra[i] * rb[j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < TM; ++i)
#pragma unroll
    for (int j = 0; j < TN; ++j)
      C[(size_t)(m0 + (STRM ? tm + i * MD : tm * TM + i)) * N + n0 + (STRN ? tn + j * ND : tn * TN + j)] = acc[i][j];
}
