// Absorbed batched matrix product for many rows: a block computes several tiles of rows in turn.
//
// Compiled by NVRTC behind absorb_common.cuh and absorb_wgmma.cuh, with their macros and WP_DEPTH (chunks of 64 k of the
// weights in flight), WP_MIN_BLOCKS (blocks that must fit one multiprocessor), WP_PREFETCH.
//
// Each weight is read and widened to bf16 once per block and stays in registers. The copy engine (TMA) writes the next
// tile of activations while this one is computed: ordinary stores would need a proxy fence, which ptxas precedes with a
// wait for all loads in flight.

#define TILE_BYTES (CHUNKS * CHUNK_BYTES)

struct alignas(64) TensorMap { u64 words[16]; };

// One thread: the activations of rows row0 to row0 + WP_ROWS, with one barrier for each chunk. Rows past the end are zero.
__device__ __forceinline__ void copy_tile(u32 to, u32 barriers, const TensorMap& map, int row0, int head) {
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%1], %6;\n"
                 "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%2, {%3, %4, %5}], [%1];"
                 :: "r"(to + j * CHUNK_BYTES), "r"(barriers + 8 * j), "l"(&map), "r"(64 * j), "r"(row0), "r"(head),
                    "n"(CHUNK_BYTES) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, int parity) {
  asm volatile("{ .reg .pred done; wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra wait; }"
               :: "r"(barrier), "r"(parity) : "memory");
}

// wgmma's register operand for 64 k of two columns. A lane has read 16 consecutive k of each, but owns k = 2 * (lane % 4)
// and the next, plus 0 and 8, in each of four steps of 16 k: the four lanes of a column exchange through `scratch`.
__device__ __forceinline__ void fragments(u32 (&a)[4][4], const Raw (&raw)[2], u32 mx, u8* scratch) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#if WP_WEIGHT == 0
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32* q = raw[half].q;
    // For lane d of the four, bytes of k 2d, 2d + 8, 2d + 1, 2d + 9: every other byte then forms a pair.
    *(uint4*)(scratch + 512 * half + g * 64 + (t ^ (g / 2)) * 16) =
        make_uint4(__byte_perm(q[0], q[2], 0x5140), __byte_perm(q[0], q[2], 0x7362), __byte_perm(q[1], q[3], 0x5140),
                   __byte_perm(q[1], q[3], 0x7362));
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const u32 q = *(const u32*)(scratch + 512 * half + g * 64 + (s ^ (g / 2)) * 16 + 4 * t);
      a[s][half] = e4m3_bytes_1_and_3(q << 8);
      a[s][half + 2] = e4m3_bytes_1_and_3(q);
    }
#else
  const u32 *q = raw[0].q, *r = raw[1].q;
  u32 words[4];
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const u32 pick = d | (4 + d) << 4;
    words[d] = __byte_perm(__byte_perm(q[0], q[1], pick), __byte_perm(r[0], r[1], pick), 0x5410);
  }
  *(uint4*)(scratch + g * 64 + (t ^ (g / 2)) * 16) = make_uint4(words[0], words[1], words[2], words[3]);
  // Lane t of the four has read the scale of group t % 2 of column t / 2.
  u32 scale[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i / 2][i % 2] = e8m0_pair(__shfl_sync(0xFFFFFFFFu, mx, lane / 4 * 4 + i));
  __syncwarp();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const u32 word = *(const u32*)(scratch + g * 64 + (s ^ (g / 2)) * 16 + 4 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[s][i / 2 + i % 2 * 2] = e2m1_pair(word, 0x0404 | i * 0x1010, scale[i / 2][s / 2]);
  }
#endif
  __syncwarp();
}

// `x` describes the activations (K, rows, heads), innermost first. Strides are in elements. w is contiguous along k, out
// along n. `w_scale` is one float32 (read for e4m3fn only), `mx_scale` e8m0 bytes (H, WP_K / 32, WP_N), `scales` the
// scales of the quantized output (rows, groups).
extern "C" __global__ void __launch_bounds__(THREADS, WP_MIN_BLOCKS)
absorb_tiles(const __grid_constant__ TensorMap x, const u8* __restrict__ w, const float* __restrict__ w_scale,
             const u8* __restrict__ mx_scale, void* __restrict__ out, void* __restrict__ scales, int w_h, int w_n,
             int s_h, int s_k, int s_n, int o_m, int o_h, int q_m, int q_g, int rows, int most) {
  const int head = blockIdx.y, column0 = blockIdx.x * COLS, row0 = blockIdx.z * most * WP_ROWS;
  // Of at most `most`; no copy may be in flight when the block ends.
  const int tiles = min(most, (rows - row0 + WP_ROWS - 1) / WP_ROWS);
  const u8* w_block = w + (long long)head * w_h + (long long)column0 * w_n;
  const u32 activations = shared_address(shared);
  // Behind the tiles of activations: the result as rows of COLS columns in bf16, 1 KiB for each warp's exchange, barriers.
  u8* result = shared + 2 * TILE_BYTES;
  u8* scratch = result + WP_ROWS * PITCH + threadIdx.x / 32 * 1024;
  const u32 barriers = shared_address(result) + WP_ROWS * PITCH + THREADS * 32;
  if (threadIdx.x == 0) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&x) : "memory");
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barriers + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#if WP_PREFETCH
  begin_early(w_block, w_n, COLS);
#endif
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // The first of this warp's 16 columns.
  const int warp_column = threadIdx.x / 32 * 16;

  Raw raw[CHUNKS][2];
  u32 mx[CHUNKS];
  const u8* w_lane = w_block + (long long)(warp_column + g) * w_n + (WP_WEIGHT ? 8 : 16) * t;
  auto load = [&](int j) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      raw[j][half] = load_weight(w_lane + (long long)(8 * half) * w_n + (WP_WEIGHT ? 32 : 64) * j);
#if WP_WEIGHT == 1
    mx[j] = load_byte(mx_scale + (long long)head * s_h + (long long)(2 * j + t % 2) * s_k +
                      (long long)(column0 + warp_column + g + t / 2 * 8) * s_n);
#else
    mx[j] = 0;
#endif
  };
#pragma unroll
  for (int j = 0; j < WP_DEPTH; ++j) load(j);
  if (threadIdx.x == 0) {
    copy_tile(activations, barriers, x, row0, head);
    if (tiles > 1) copy_tile(activations + TILE_BYTES, barriers + 8 * CHUNKS, x, row0 + WP_ROWS, head);
  }
  const float weight_scale = WP_WEIGHT ? 1.0f : load_float(w_scale);
  // The barriers are initialized; and ptxas cannot place the wait for the first weights before the last loads.
  __syncthreads();

  float acc[PARTS][WIDTH / 2];
  u32 a[CHUNKS][4][4];
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {
    fragments(a[j], raw[j], mx[j], scratch);
    if (j + WP_DEPTH < CHUNKS) load(j + WP_DEPTH);
    wait_for(barriers + 8 * j, 0);
    multiply(acc, a[j], activations, j);
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");

#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int next = (tile + 1) % 2;
    write_result(result, acc, weight_scale);
    __syncthreads();
    // Every warp is done with this tile's activations: those of the tile after the next one take their place.
    if (threadIdx.x == 0 && tile + 2 < tiles)
      copy_tile(activations + tile % 2 * TILE_BYTES, barriers + 8 * (tile % 2 * CHUNKS), x, row0 + (tile + 2) * WP_ROWS,
                head);
    // The tensor cores compute the next tile while this one is written out.
    if (tile + 1 < tiles)
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        wait_for(barriers + 8 * (next * CHUNKS + j), (tile + 1) / 2 % 2);
        multiply(acc, a[j], activations + next * TILE_BYTES, j);
      }
    write_rows(result, row0 + tile * WP_ROWS, rows, head, column0, out, o_m, o_h, scales, q_m, q_g);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    __syncthreads();
  }
}
