/* A 2-D image of float32 under a small window of weights, without padding (a "valid" cross-correlation).

   The image is cut into blocks of ROWS x COLUMNS results, and ORDER, the name of one of the functions below, says in
   which order the products of a block are summed up. */

struct shape {
    long width_in, width_out;
    int window_height, window_width, rows, columns;
};

/* One result after the other: no intermediate results in memory, but sums that cannot be vectorised. */
static inline void by_pixel(const float *restrict in, const float *restrict weights, float *restrict out, struct shape s)
{
    for (int y = 0; y < s.rows; y++)
        for (int x = 0; x < s.columns; x++) {
            float sum = 0;
            for (int v = 0; v < s.window_height; v++)
                for (int u = 0; u < s.window_width; u++)
                    sum += weights[v * s.window_width + u] * in[(y + v) * s.width_in + x + u];
            out[y * s.width_out + x] = sum;
        }
}

/* One weight after the other, over the whole block: long vectors, but the block is written once per weight. */
static inline void by_weight(const float *restrict in, const float *restrict weights, float *restrict out, struct shape s)
{
    for (int y = 0; y < s.rows; y++)
        for (int x = 0; x < s.columns; x++)
            out[y * s.width_out + x] = 0;
    for (int v = 0; v < s.window_height; v++)
        for (int u = 0; u < s.window_width; u++)
            for (int y = 0; y < s.rows; y++)
                for (int x = 0; x < s.columns; x++)
                    out[y * s.width_out + x] += weights[v * s.window_width + u] * in[(y + v) * s.width_in + x + u];
}

/* STRIP results at a time, kept in registers: the best of both, if the compiler sees it. */
static inline void by_strip(const float *restrict in, const float *restrict weights, float *restrict out, struct shape s)
{
    const int whole = s.columns - s.columns % STRIP;
    for (int y = 0; y < s.rows; y++)
        for (int x = 0; x < whole; x += STRIP) {
            float sum[STRIP] = {0};
            for (int v = 0; v < s.window_height; v++)
                for (int u = 0; u < s.window_width; u++)
                    for (int i = 0; i < STRIP; i++)
                        sum[i] += weights[v * s.window_width + u] * in[(y + v) * s.width_in + x + u + i];
            for (int i = 0; i < STRIP; i++)
                out[y * s.width_out + x + i] = sum[i];
        }
    s.columns -= whole;
    by_pixel(in + whole, weights, out + whole, s);
}

void convolve(const float *in, const float *weights, float *out, int height, int width, int window_height, int window_width)
{
    const int height_out = height - window_height + 1, width_out = width - window_width + 1;
    struct shape s = {width, width_out, window_height, window_width, 0, 0};
    for (int y = 0; y < height_out; y += ROWS)
        for (int x = 0; x < width_out; x += COLUMNS) {
            s.rows = height_out - y < ROWS ? height_out - y : ROWS;
            s.columns = width_out - x < COLUMNS ? width_out - x : COLUMNS;
            ORDER(in + y * s.width_in + x, weights, out + y * s.width_out + x, s);
        }
}
