/* C = A B for row-major matrices of float32.

   A tile of ROWS x (VECTORS * LANES) results is kept in registers while a panel of A and a panel of B are walked along
   their common dimension. The more results per tile, the fewer loads per multiplication, until the registers run out;
   LANES should be what one register holds. PACK copies a panel of B into adjacent memory first, which pays if the panel
   is used often enough, and if the rows of B are so far apart that walking down them misses the TLB. */
#include <string.h>

#define COLUMNS (LANES * VECTORS)
#define DEPTH 512 /* a packed panel of the widest tile fills half of a 256 kB second-level cache */

/* aligned(4): a tile may begin at any column. */
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));

static inline void tile(const float *restrict a, const float *restrict b, float *restrict c,
                        long stride_a, long stride_b, long stride_c, int depth)
{
    vector sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++)
            sum[i][j] = *(const vector *)(c + i * stride_c + j * LANES);
    for (int p = 0; p < depth; p++)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++)
                sum[i][j] += a[i * stride_a + p] * *(const vector *)(b + p * stride_b + j * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++)
            *(vector *)(c + i * stride_c + j * LANES) = sum[i][j];
}

/* What is left at the lower and right edge, where no whole tile fits. */
static void edge(const float *a, const float *b, float *c, long stride_a, long stride_b, long stride_c,
                 int rows, int columns, int depth)
{
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < depth; p++)
            for (int j = 0; j < columns; j++)
                c[i * stride_c + j] += a[i * stride_a + p] * b[p * stride_b + j];
}

void matmul(const float *a, const float *b, float *c, int m, int n, int k)
{
    static _Thread_local float packed[DEPTH * COLUMNS] __attribute__((aligned(64)));
    const int whole_m = m - m % ROWS, whole_n = n - n % COLUMNS;

    memset(c, 0, sizeof(float) * (size_t)m * (size_t)n);
    for (int p = 0; p < k; p += DEPTH) {
        const int depth = k - p < DEPTH ? k - p : DEPTH;
        const float *rows_a = a + p, *rows_b = b + (long)p * n;
        for (int j = 0; j < whole_n; j += COLUMNS) {
            const float *panel = rows_b + j;
            long stride = n;
            if (PACK) {
                for (int q = 0; q < depth; q++)
                    memcpy(packed + q * COLUMNS, panel + (long)q * n, sizeof(float) * COLUMNS);
                panel = packed;
                stride = COLUMNS;
            }
            for (int i = 0; i < whole_m; i += ROWS)
                tile(rows_a + (long)i * k, panel, c + (long)i * n + j, k, stride, n, depth);
            edge(rows_a + (long)whole_m * k, panel, c + (long)whole_m * n + j, k, stride, n, m - whole_m, COLUMNS, depth);
        }
        edge(rows_a, rows_b + whole_n, c + whole_n, k, n, n, m, n - whole_n, depth);
    }
}
