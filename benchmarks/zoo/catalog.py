"""The models of the zoo, by kind: one row each, with a name, a task, a description and two plans.

`make test-all` verifies each model under its two plans on two ranks, which must be the same training as one
process; `works.py` verifies more plans, and writes docs/works.md.
"""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.resolve()
STAGES = "pp=2,pp_schedule=1f1b"
SHARDED, SPLIT = ("zero3", STAGES), ("tp=2", STAGES)  # the two plans of most models
NO_STAGES, NO_TENSOR, ONLY_SHARDED = ("zero3", "tp=2"), ("ddp", STAGES), ("ddp", "zero3")
ONLY_REPLICATED = ("ddp", "ddp,microbatches=2")


@dataclass(frozen=True)
class Entry:
    """A model. task: a built-in task or `FILE:Class` in this folder, and values of its fields."""

    name: str
    task: str
    text: str
    plans: tuple[str, str] = SHARDED

    @property
    def reference(self) -> str:
        """The task, as a spec names it."""
        name = self.task.split()[0]
        return str(FOLDER / name) if ":" in name else name

    @property
    def settings(self) -> dict[str, str]:
        """The values of the task's fields, as text."""
        return dict(pair.split("=", 1) for pair in self.task.split()[1:])


def decoder(name: str, kind: str, text: str, plans: tuple[str, str] = SHARDED) -> Entry:
    return Entry(name, f"decoders.py:Decoder kind={kind}", text, plans)


def encoder(name: str, kind: str, text: str, plans: tuple[str, str] = SHARDED) -> Entry:
    return Entry(name, f"encoders.py:Encoder kind={kind}", text, plans)


def translation(name: str, kind: str, text: str, plans: tuple[str, str] = SHARDED) -> Entry:
    return Entry(name, f"seq2seq.py:Translation kind={kind}", text, plans)


def vision(name: str, kind: str, text: str, plans: tuple[str, str] = SHARDED) -> Entry:
    return Entry(name, f"vision.py:Vision kind={kind}", text, plans)


def signals(name: str, kind: str, text: str, plans: tuple[str, str] = SHARDED) -> Entry:
    return Entry(name, f"multimodal.py:Signals kind={kind}", text, plans)


CATALOG: dict[str, list[Entry]] = {
    "Language models": [
        Entry("text", "text width=32 depth=8 heads=8 context=16", "the byte-level GPT of the built-in task"),
        Entry("Encoder", "attention.py:TransformerEncoder", "torch's `nn.TransformerEncoder`, causal"),
        Entry("Llama", "decoders.py:Llama", "rotary positions, grouped-query attention", SPLIT),
        Entry("Llama, tied", "decoders.py:Llama tied=true", "one matrix for both embeddings"),
        Entry("Llama, LoRA", "decoders.py:LlamaLora", "frozen weights, adapters of rank 4"),
        Entry(
            "GPT-2", "decoders.py:Gpt2", "learned positions, tied embeddings, a prime vocabulary size", SPLIT
        ),
        decoder("BLOOM", "bloom", "ALiBi"),
        decoder("CodeGen", "codegen", "attention and MLP in parallel"),
        decoder("Cohere", "cohere", "parallel blocks, scaled logits", SPLIT),
        decoder("Falcon", "falcon", "one key and value for all heads"),
        decoder("Gemma", "gemma", "wide heads, scaled embeddings"),
        decoder("Gemma 2", "gemma2", "sliding windows, soft caps", SPLIT),
        decoder("Gemma 3", "gemma3", "sliding and full attention, norms of queries and keys"),
        decoder("GPT-J", "gptj", "partly rotary"),
        decoder("GPT-Neo", "gpt-neo", "global and local attention", SPLIT),
        decoder("GPT-NeoX", "gpt-neox", "fused queries, keys and values"),
        decoder("Granite", "granite", "scaled residuals"),
        decoder("Mistral", "mistral", "sliding windows", SPLIT),
        decoder("MPT", "mpt", "ALiBi without biases"),
        decoder("OLMo", "olmo", "norms without weights"),
        decoder("OLMo 2", "olmo2", "norms after the blocks", SPLIT),
        decoder("OPT", "opt", "learned positions, ReLU"),
        decoder("Phi", "phi", "parallel blocks, partly rotary"),
        decoder("Phi-3", "phi3", "fused projections", SPLIT),
        decoder("Qwen2", "qwen2", "biases of queries, keys and values"),
        decoder("Qwen3", "qwen3", "norms of queries and keys"),
        decoder("StableLM", "stablelm", "partly rotary, LayerNorm", SPLIT),
        decoder("StarCoder2", "starcoder2", "grouped queries, biases"),
    ],
    "Mixtures of experts": [
        Entry(
            "Mixtral", "decoders.py:Mixture kind=mixtral", "with the loss that balances experts", NO_STAGES
        ),
        Entry(
            "Qwen3-MoE",
            "decoders.py:Mixture kind=qwen3-moe",
            "with the loss that balances experts",
            NO_STAGES,
        ),
        decoder("DeepSeek-V3", "deepseek-v3", "latent attention, shared experts"),
        decoder("GPT-OSS", "gpt-oss", "attention sinks, sliding windows"),
        decoder("OLMoE", "olmoe", "norms of queries and keys", SPLIT),
    ],
    "State spaces and recurrences": [
        decoder("Mamba", "mamba", "selective state space"),
        decoder("Mamba-2", "mamba2", "state space in chunks"),
        decoder("Qwen3-Next", "qwen3-next", "gated delta rule, attention, experts", SPLIT),
        decoder("RecurrentGemma", "recurrent-gemma", "recurrences and local attention"),
        decoder("RWKV", "rwkv", "linear attention as a recurrence"),
        decoder("xLSTM", "xlstm", "LSTM with a matrix memory", SPLIT),
    ],
    "Text encoders": [
        encoder("ALBERT", "albert", "all layers share their weights"),
        encoder("BERT", "bert", "masked language model"),
        encoder("BigBird", "big-bird", "with full attention", SPLIT),
        encoder("ConvBERT", "convbert", "attention and dynamic convolutions"),
        encoder("DeBERTa-v2", "deberta-v2", "disentangled positions"),
        encoder("DistilBERT", "distilbert", "BERT without types and pooler", SPLIT),
        encoder("ELECTRA", "electra", "small embeddings"),
        encoder("ESM", "esm", "a protein model with rotary positions"),
        encoder("FNet", "fnet", "Fourier transforms in place of attention", SPLIT),
        encoder("MobileBERT", "mobilebert", "bottlenecks"),
        encoder("ModernBERT", "modernbert", "local and global attention"),
        encoder("MPNet", "mpnet", "buckets of relative positions", SPLIT),
        encoder("Perceiver", "perceiver", "attention to few latents"),
        encoder("RoBERTa", "roberta", "positions that depend on the padding"),
        encoder("RoFormer", "roformer", "rotary positions", SPLIT),
        encoder("SqueezeBERT", "squeezebert", "grouped convolutions as projections"),
        encoder("XLNet", "xlnet", "relative positions"),
    ],
    "Encoders with decoders": [
        translation("BART", "bart", "learned positions", SPLIT),
        translation("Blenderbot", "blenderbot", "norms before the layers"),
        translation("M2M-100", "m2m-100", "sines as positions"),
        translation("Marian", "marian", "a bias of the logits", SPLIT),
        translation("mT5", "mt5", "gated MLP"),
        translation("Pegasus", "pegasus", "sines as positions"),
        translation("ProphetNet", "prophetnet", "predicts several next tokens", SPLIT),
        translation("T5", "t5", "buckets of relative positions"),
        Entry("Transformer", "attention.py:Transformer", "torch's `nn.Transformer`"),
        Entry("Seq2seq GRU", "recurrent.py:Seq2Seq", "additive attention", SPLIT),
        Entry("Speech2Text", "seq2seq.py:Transcription kind=speech-to-text", "convolutions, then attention"),
        Entry("Whisper", "seq2seq.py:Transcription kind=whisper", "spectrograms to tokens"),
    ],
    "Convolutional networks": [
        Entry("digits", "digits width=4", "the CNN of the built-in task", SPLIT),
        Entry("ResNet", "convnets.py:ResNet", "the blocks of ResNet-18, with BatchNorm"),
        vision("BiT", "bit", "ResNet with GroupNorm and standardized weights"),
        Entry("CapsNet", "convnets.py:CapsNet", "capsules with routing", NO_TENSOR),
        vision("ConvNeXt", "convnext", "wide depthwise convolutions, LayerNorm"),
        vision("ConvNeXt V2", "convnextv2", "global response normalization"),
        Entry("DenseNet", "convnets.py:DenseNet", "concatenated features", SPLIT),
        vision("EfficientNet", "efficientnet", "inverted residuals, squeeze and excitation"),
        Entry("GoogLeNet", "convnets.py:GoogLeNet", "branches side by side"),
        vision("MobileNetV1", "mobilenet-v1", "depthwise convolutions", SPLIT),
        vision("MobileNetV2", "mobilenet-v2", "inverted residuals"),
        Entry("MobileNetV3", "convnets.py:MobileNetV3", "squeeze and excitation, hard swish"),
        vision("RegNet", "regnet", "grouped convolutions", SPLIT),
        Entry("ShuffleNetV2", "convnets.py:ShuffleNet", "split and interleaved channels"),
        Entry("Spectral CNN", "convnets.py:SpectralCnn", "spectral norm"),
        Entry("U-Net", "convnets.py:Segment", "a class for each pixel", NO_TENSOR),
        Entry("VGG", "convnets.py:Vgg", "convolutions, then linear layers with dropout"),
    ],
    "Vision transformers": [
        vision("BEiT", "beit", "relative position bias"),
        vision("CvT", "cvt", "convolutions as projections, BatchNorm", SPLIT),
        vision("DeiT", "deit", "two class tokens"),
        vision("DINOv2", "dinov2", "scaled layers"),
        vision("FocalNet", "focalnet", "focal modulation in place of attention", SPLIT),
        Entry("gMLP", "attention.py:Gmlp", "gates over positions"),
        vision("LeViT", "levit", "attention bias, BatchNorm, two heads"),
        Entry("MLP-Mixer", "attention.py:Mixer", "MLPs over patches and channels", SPLIT),
        vision("MobileViT", "mobilevit", "convolutions and attention"),
        vision("PoolFormer", "poolformer", "pooling in place of attention"),
        vision("PVT", "pvt", "a pyramid with reduced keys", SPLIT),
        Entry("SegFormer", "vision.py:Segmentation", "segmentation, features of several sizes", NO_STAGES),
        vision("Swin", "swin", "shifted windows"),
        vision("Swin V2", "swinv2", "cosine attention, a network of position biases", SPLIT),
        vision("ViT", "vit", "patches and a class token"),
        Entry(
            "ViT-MAE",
            "vision.py:Reconstruction",
            "a masked autoencoder, with a mask for each sample",
            NO_STAGES,
        ),
        Entry("YOLOS", "vision.py:Detection", "detection tokens, losses of classes and boxes", SPLIT),
    ],
    "Images with text, sound, video": [
        Entry("CLIP", "multimodal.py:Clip", "InfoNCE over the global batch", NO_STAGES),
        Entry("SigLIP", "multimodal.py:Siglip", "sigmoids of all pairs of the global batch", NO_STAGES),
        Entry("ViLT", "multimodal.py:Vilt", "one transformer over patches and tokens", NO_TENSOR),
        signals("AST", "ast", "spectrograms as patches"),
        signals("HuBERT", "hubert", "convolutions over waves, weight norm"),
        signals("TimeSformer", "timesformer", "attention over time and space", SPLIT),
        signals("VideoMAE", "videomae", "tubes of video"),
        signals("Wav2Vec2", "wav2vec2", "convolutions over waves, weight norm"),
        signals("WavLM", "wavlm", "gated relative position bias", SPLIT),
        Entry("CTC", "recurrent.py:SpeechCtc", "convolutions, a bidirectional GRU and the CTC loss"),
    ],
    "Models that generate": [
        Entry("Autoencoder", "generative.py:AutoEncoder", "a narrow middle"),
        Entry("DDPM", "generative.py:Ddpm", "a U-Net that predicts noise; draws by sample", SPLIT),
        Entry("DiT", "attention.py:DiT", "a transformer with modulated norms; draws by sample"),
        Entry("GAN", "generative.py:Gan", "two optimizers", ONLY_SHARDED),
        Entry("MADE", "autoregressive.py:Made", "masked linear layers", NO_TENSOR),
        Entry("PixelCNN", "autoregressive.py:PixelCnn", "masked convolutions", NO_TENSOR),
        Entry("RealNVP", "generative.py:RealNvp", "a normalizing flow"),
        Entry("VAE", "generative.py:Vae", "latent noise by sample, two losses", SPLIT),
        Entry("VQ-VAE", "generative.py:VqVae", "a codebook of moving averages"),
        Entry("WaveNet", "autoregressive.py:WaveNet", "dilated causal convolutions", NO_TENSOR),
        Entry("WGAN-GP", "generative.py:WganGp", "two optimizers, a penalty on the gradient", ONLY_SHARDED),
    ],
    "Losses of the whole batch, and teachers": [
        Entry(
            "Barlow Twins",
            "contrastive.py:BarlowTwins",
            "the correlation of features over the batch",
            NO_STAGES,
        ),
        Entry("BYOL", "contrastive.py:Byol", "a target network that follows the online network", NO_STAGES),
        Entry(
            "Distillation",
            "contrastive.py:Distillation",
            "a frozen teacher, a moving average of weights",
            NO_STAGES,
        ),
        Entry("InfoNCE", "contrastive.py:InfoNce", "two views, a learned temperature", NO_STAGES),
        Entry("SimCLR", "contrastive.py:SimClr", "all other views are negatives", NO_STAGES),
        Entry("Triplet", "contrastive.py:Triplet", "the hardest pairs of the batch", NO_STAGES),
        Entry("VICReg", "contrastive.py:VicReg", "variance, invariance and covariance", NO_STAGES),
    ],
    "Series": [
        Entry("Character CNN", "recurrent.py:CharCnn", "convolutions and highway layers"),
        Entry("ConvLSTM", "recurrent.py:ConvLstm", "an LSTM of convolutions over video", ONLY_SHARDED),
        Entry("Decision Transformer", "multimodal.py:DecisionTransformer", "returns, states and actions"),
        Entry("GRU", "recurrent.py:Gru", "torch's `nn.GRU`", NO_TENSOR),
        Entry("LSTM", "recurrent.py:Lstm", "torch's `nn.LSTM`, two layers", NO_TENSOR),
        Entry("LSTM cell", "recurrent.py:LstmCell", "a cell in a loop", ONLY_SHARDED),
        Entry("LSTM, packed", "recurrent.py:PackedLstm", "bidirectional, packed sequences", ONLY_SHARDED),
        Entry("PatchTST", "multimodal.py:PatchTst", "patches of series", SPLIT),
        Entry("TCN", "recurrent.py:Tcn", "dilated causal convolutions with weight norm", NO_TENSOR),
    ],
    "Tables, fields, sets and graphs": [
        Entry("DCN-V2", "tabular.py:CrossNetwork", "cross layers, bags of embeddings"),
        Entry("DeepFM", "tabular.py:DeepFm", "a factorization machine with an MLP", NO_STAGES),
        Entry("DLRM", "tabular.py:Dlrm sparse=false", "products of embeddings"),
        Entry("DLRM, sparse", "tabular.py:Dlrm", "sparse gradients of embeddings", ONLY_REPLICATED),
        Entry("GAT", "graphs.py:Graph kind=gat", "attention over neighbours", SPLIT),
        Entry("GCN", "graphs.py:Graph kind=gcn", "convolutions of graphs"),
        Entry("Linear", "tabular.py:Linear", "linear regression", ONLY_SHARDED),
        Entry("MPNN", "graphs.py:Graph kind=mpnn", "messages along edges, a GRU cell", SPLIT),
        Entry("NeRF", "tabular.py:Nerf", "integrals along rays"),
        Entry("PINN", "tabular.py:Physics", "a differential equation as loss", NO_STAGES),
        Entry("PointNet", "graphs.py:PointNet", "a function of points, with BatchNorm", SPLIT),
        Entry("Set Transformer", "attention.py:SetTransformer", "attention of learned seeds to points"),
        Entry("SIREN", "tabular.py:Siren", "sines of coordinates"),
        Entry("TabTransformer", "tabular.py:TabTransformer", "attention among the fields of a row", SPLIT),
        Entry("uneven", "tabular.py:Uneven", "an MLP in which all sizes are odd", NO_TENSOR),
    ],
}
ENTRIES = {entry.name: entry for entries in CATALOG.values() for entry in entries}
