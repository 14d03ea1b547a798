/* The transpose of a row-major matrix of float32, block by block.

   Read along the rows, and every store goes to another cache line; write along the rows, and every load comes from one.
   In a block of ROWS x COLUMNS the lines are used again before they are evicted, if the block is small enough, and if
   the lines do not all fall into the same few sets of the cache, as they do where rows are a power of two apart. */

static inline void read_rows(const float *restrict in, float *restrict out, long height, long width, int rows, int columns)
{
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            out[j * height + i] = in[i * width + j];
}

static inline void write_rows(const float *restrict in, float *restrict out, long height, long width, int rows, int columns)
{
    for (int j = 0; j < columns; j++)
        for (int i = 0; i < rows; i++)
            out[j * height + i] = in[i * width + j];
}

void transpose(const float *in, float *out, int height, int width)
{
    for (int i = 0; i < height; i += ROWS)
        for (int j = 0; j < width; j += COLUMNS) {
            const float *from = in + (long)i * width + j;
            float *to = out + (long)j * height + i;
            /* Whole blocks have constant bounds, which lets the compiler unroll them. */
            if (height - i >= ROWS && width - j >= COLUMNS)
                ORDER(from, to, height, width, ROWS, COLUMNS);
            else
                ORDER(from, to, height, width, height - i < ROWS ? height - i : ROWS,
                      width - j < COLUMNS ? width - j : COLUMNS);
        }
}
