"""Start-up logs in the words of vLLM's versions, as users published them; names are changed."""

# ruff: noqa: E501 - log lines

from __future__ import annotations

V0_6 = """\
INFO 12-22 10:55:10 api_server.py:652] vLLM API server version 0.6.6
INFO 12-22 10:55:10 api_server.py:653] args: Namespace(subparser='serve', model_tag='acme/small', \
host=None, port=8000, api_key='secret-key', lora_modules=None, model='acme/small', dtype='auto', \
kv_cache_dtype='auto', max_model_len=4096, gpu_memory_utilization=0.9, tensor_parallel_size=1, \
served_model_name=None, limit_mm_per_prompt=None, enforce_eager=False)
INFO 12-22 10:55:14 llm_engine.py:234] Initializing an LLM engine (v0.6.6) with config: \
model='acme/small', speculative_config=None, dtype=torch.bfloat16, max_seq_len=4096, \
tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, kv_cache_dtype=auto
INFO 12-22 10:55:15 selector.py:120] Using Flash Attention backend.
INFO 12-22 10:55:30 model_runner.py:1099] Loading model weights took 14.9888 GB
INFO 12-22 10:55:32 worker.py:241] the current vLLM instance can use total_gpu_memory (23.68GiB) x \
gpu_memory_utilization (0.90) = 21.31GiB
INFO 12-22 10:55:32 worker.py:241] model weights take 14.99GiB; non_torch_memory takes 0.06GiB; \
PyTorch activation peak memory takes 1.20GiB; the rest of the memory reserved for KV Cache is \
5.06GiB.
INFO 12-22 10:55:33 gpu_executor.py:76] # GPU blocks: 2590, # CPU blocks: 2048
INFO 12-22 10:55:33 gpu_executor.py:80] Maximum concurrency for 4096 tokens per request: 10.12x
INFO 12-22 10:55:51 model_runner.py:1527] Graph capturing finished in 13 secs, took 0.27 GiB
INFO:     Application startup complete.
"""

V0_8_V1 = """\
INFO 05-05 15:15:08 [api_server.py:1034] vLLM API server version 0.8.5
(VllmWorker rank=0 pid=222) INFO 05-05 15:15:20 [cuda.py:221] Using Flash Attention backend on V1 \
engine.
(VllmWorker rank=1 pid=240) INFO 05-05 15:15:40 [gpu_model_runner.py:1347] Model loading took \
6.3102 GiB and 1.202734 seconds
(VllmWorker rank=0 pid=222) INFO 05-05 15:15:40 [gpu_model_runner.py:1347] Model loading took \
6.4102 GiB and 1.902797 seconds
(VllmWorker rank=0 pid=222) INFO 05-05 15:15:50 [gpu_worker.py:255] Available KV cache memory: \
18.83 GiB
(VllmWorker rank=1 pid=240) INFO 05-05 15:15:50 [gpu_worker.py:255] Available KV cache memory: \
18.91 GiB
INFO 05-05 15:15:50 [kv_cache_utils.py:634] GPU KV cache size: 176,240 tokens
INFO 05-05 15:15:50 [kv_cache_utils.py:637] Maximum concurrency for 8,192 tokens per request: 21.51x
(VllmWorker rank=0 pid=222) INFO 05-05 15:16:10 [gpu_model_runner.py:1686] Graph capturing finished \
in 19 secs, took 0.54 GiB
INFO:     Application startup complete.
"""

V0_19 = """\
2026-04-19 12:18:36.353 | (APIServer pid=1) INFO 04-19 10:18:36 [utils.py:299]  ▄▄ ▄█ █     █     \
█ ▀▄▀ █  version 0.19.1
2026-04-19 12:18:36.356 | (APIServer pid=1) INFO 04-19 10:18:36 [utils.py:233] non-default args: \
{'model_tag': 'acme/large-FP8', 'api_key': ['secret-key'], 'host': '0.0.0.0', 'lora_modules': \
[LoRAModulePath(name='secret-name', path='/p', base_model_name=None)], 'model': 'acme/large-FP8', \
'max_model_len': 65536, 'served_model_name': ['x'], 'tensor_parallel_size': 4, \
'gpu_memory_utilization': 0.8, 'kv_cache_dtype': 'fp8_e4m3', 'enable_prefix_caching': False, \
'enforce_eager': True, 'speculative_config': {'model': 'acme/draft', 'max_model_len': 7}, \
'max_num_seqs': 32}
2026-04-19 12:18:49.415 | (EngineCore pid=207) INFO 04-19 10:18:49 [core.py:105] Initializing a V1 \
LLM engine (v0.19.1) with config: model='acme/large-FP8', dtype=torch.bfloat16, max_seq_len=65536, \
tensor_parallel_size=4, pipeline_parallel_size=1, data_parallel_size=1, kv_cache_dtype=fp8_e4m3
(EngineCore pid=207) INFO 04-19 10:18:50 [cuda.py:368] Using FLASHINFER attention backend out of \
potential backends: ['FLASHINFER', 'TRITON_ATTN'].
(Worker_TP0 pid=300) INFO 04-19 10:19:30 [gpu_model_runner.py:4879] Model loading took 12.66 GiB \
memory and 31.657031 seconds
(Worker_TP0 pid=300) INFO 04-19 10:19:50 [gpu_worker.py:440] Available KV cache memory: 52.36 GiB
(EngineCore pid=207) INFO 04-19 10:19:51 [kv_cache_utils.py:1319] GPU KV cache size: 686,320 tokens
(EngineCore pid=207) INFO 04-19 10:19:51 [kv_cache_utils.py:1324] Maximum concurrency for 65,536 \
tokens per request: 10.47x
(Worker_TP0 pid=300) INFO 04-19 10:19:58 [gpu_model_runner.py:6243] Graph capturing finished in 2 \
secs, took 0.11 GiB
(APIServer pid=1) INFO:     Application startup complete.
"""

V0_29 = """\
(APIServer pid=1335) INFO 09-12 22:43:11 [api_utils.py:286] non-default args: {'model_tag': \
'/snap/', 'max_model_len': 98304, 'gpu_memory_utilization': 0.85}
(EngineCore pid=1908) INFO 09-12 22:43:30 [core.py:123] Initializing a V1 LLM engine (v0.29.0) with \
config: model='/snap/', dtype=torch.float16, seed=7, enforce_eager=False, tensor_parallel_size=1
(EngineCore pid=1908) INFO 09-12 22:43:31 [gpu_worker.py:441] Initial free memory 31.17 GiB, \
reserved 1.62 GiB memory for KV Cache as specified by kv_cache_memory_bytes config and skipped \
memory profiling.
(EngineCore pid=1908) INFO 09-12 22:43:32 [kv_cache_utils.py:2146] GPU KV cache size: 112,347 \
tokens, Maximum concurrency for 98,304 tokens per request: 1.14x
(APIServer pid=1335) INFO:     Application startup complete.
"""

V0_32_CPU = """\
Triton is installed, but doesn't include CPU backend. Disabling Triton.
(APIServer pid=2933) INFO 11-22 13:54:51 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0
(APIServer pid=2933) INFO 11-22 13:54:51 [api_utils.py:286] non-default args: {'model_tag': \
'/models/tiny', 'host': '127.0.0.1', 'port': 8123, 'model': '/models/tiny', 'dtype': 'float32', \
'max_model_len': 2048, 'enforce_eager': True, 'served_model_name': ['tiny'], 'block_size': 32, \
'max_num_seqs': 16}
(APIServer pid=2933) INFO 11-22 13:57:09 [model.py:733] Resolved architecture: LlamaForCausalLM
(APIServer pid=2933) INFO 11-22 13:57:09 [model.py:2152] Using max model len 2048
(EngineCore pid=5277) INFO 11-22 13:59:16 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with \
config: model='/models/tiny', speculative_config=None, tokenizer='/models/tiny', dtype=torch.float32, \
max_seq_len=2048, tensor_parallel_size=1
(Worker pid=5849) INFO 11-22 14:00:17 [default_loader.py:501] Loading weights took 0.35 seconds
(Worker pid=5849) INFO 11-22 14:00:22 [cpu_worker.py:260] Explicitly set (1.0/12.09) GiB for KV \
cache on node 0.
(EngineCore pid=5277) INFO 11-22 14:00:22 [kv_cache_utils.py:2327] CPU KV cache size: 65,536 tokens, \
Maximum concurrency for 2,048 tokens per request: 32.00x
(APIServer pid=2933) INFO 11-22 14:00:29 [entry.py:140] Starting vLLM server on http://127.0.0.1:8123
INFO:     Started server process [2933]
INFO:     Waiting for application startup.
INFO:     Application startup complete.
"""

UNCAUGHT = """\
(APIServer pid=710) INFO 11-22 13:49:47 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0
(APIServer pid=710) INFO 11-22 13:49:47 [api_utils.py:286] non-default args: {'model_tag': \
'/models/tiny', 'model': '/models/tiny', 'max_model_len': 32768}
Traceback (most recent call last):
  File "/venv/bin/vllm", line 8, in <module>
    sys.exit(main())
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, invalid literal for int() with base 10: '0.05' [type=value_error, \
input_value=ArgsKwargs((), {'api_key': secret-key, 'shutdown_timeout': 0}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""

KV_TOO_SMALL = """\
(APIServer pid=1) INFO 10-08 20:33:00 [api_server.py:1839] vLLM API server version 0.11.0
(APIServer pid=1) INFO 10-08 20:33:00 [utils.py:233] non-default args: {'model_tag': \
'Qwen/Qwen3-8B', 'model': 'Qwen/Qwen3-8B', 'gpu_memory_utilization': 0.9}
(EngineCore_DP0 pid=18799) INFO 10-08 20:33:40 [gpu_model_runner.py:2602] Model loading took \
15.2683 GiB and 9.1 seconds
(EngineCore_DP0 pid=18799) INFO 10-08 20:33:48 [gpu_worker.py:298] Available KV cache memory: 4.50 \
GiB
(EngineCore_DP0 pid=18799) ERROR 10-08 20:33:48 [core.py:708] EngineCore failed to start.
(EngineCore_DP0 pid=18799) ERROR 10-08 20:33:48 [core.py:708] Traceback (most recent call last):
(EngineCore_DP0 pid=18799) ERROR 10-08 20:33:48 [core.py:708]     raise ValueError(
(EngineCore_DP0 pid=18799) ERROR 10-08 20:33:48 [core.py:708] ValueError: To serve at least one \
request with the models's max seq len (40960), (5.62 GiB KV cache is needed, which is larger than \
the available KV cache memory (4.50 GiB). Based on the available memory, the estimated maximum \
model length is 32768. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when \
initializing the engine.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed \
core proc(s): {'EngineCore_DP0': 1}
"""

ENGINE_DIED = (
    V0_19
    + """\
(APIServer pid=1) INFO 04-19 10:29:58 [loggers.py:310] Engine 000: Avg prompt throughput: 1.0 \
tokens/s, Avg generation throughput: 58.7 tokens/s, Running: 1 reqs, Waiting: 0 reqs
(EngineCore pid=207) ERROR 04-19 10:30:06 [core.py:1131] EngineCore encountered a fatal error.
(EngineCore pid=207) ERROR 04-19 10:30:06 [core.py:1131] Traceback (most recent call last):
(EngineCore pid=207) ERROR 04-19 10:30:06 [core.py:1131] torch.OutOfMemoryError: CUDA out of \
memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB.
(APIServer pid=1) ERROR 04-19 10:30:06 [async_llm.py:699] vllm.v1.engine.exceptions.EngineDeadError:\
 EngineCore encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=1) INFO:     Shutting down
"""
)
