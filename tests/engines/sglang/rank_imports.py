"""What every rank needs: imported once, by the server that the ranks are forked from."""

import sglang.srt.model_loader.loader
import sglang.srt.models.deepseek_nextn
import sglang.srt.models.deepseek_v2
import sglang.srt.models.registry
import sglang.srt.server_args  # noqa: F401
