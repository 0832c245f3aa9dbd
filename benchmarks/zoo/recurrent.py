"""Recurrent and causal networks for sequences, written with torch alone."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from samples import CLASSES, LENGTH, VOCABULARY, Series, Synthetic, Tokens


class PackedModel(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.head(hidden)


class PackedLstm(Synthetic):
    """Tag sequences of different lengths, which are packed for a bidirectional LSTM."""

    width: int = 16

    def make(self, generator: Generator) -> dict[str, Tensor]:
        return {
            "tokens": torch.randint(VOCABULARY, (LENGTH,), generator=generator),
            "tags": torch.randint(CLASSES, (LENGTH,), generator=generator),
            "length": torch.randint(3, LENGTH + 1, (), generator=generator),
        }

    def model(self) -> nn.Module:
        return PackedModel(self.width)

    def inputs(self, batch: dict[str, Tensor]) -> Any:
        return batch["tokens"], batch["length"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output.mT, batch["tags"], reduction="none")

    def weights(self, batch: dict[str, Tensor]) -> Tensor:
        used = torch.arange(LENGTH, device=batch["length"].device) < batch["length"][:, None]
        return used.to(torch.get_default_dtype())


class Recurrent(nn.Module):
    """A recurrent layer of torch, and a linear layer after it."""

    def __init__(self, layer: nn.Module, width: int, outputs: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, outputs)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.layer(series)[0])


class Lstm(Series):
    def model(self) -> nn.Module:
        layer = nn.LSTM(self.variables, self.width, 2, batch_first=True)
        return Recurrent(layer, self.width, self.variables)


class Gru(Series):
    def model(self) -> nn.Module:
        return Recurrent(nn.GRU(self.variables, self.width, batch_first=True), self.width, self.variables)


class CellModel(nn.Module):
    """An LSTM cell, called in a loop."""

    def __init__(self, variables: int, width: int):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(variables, width), nn.Linear(width, variables)

    def forward(self, series: Tensor) -> Tensor:
        state, outputs = None, []
        for value in series.unbind(1):
            state = self.cell(value, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, 1)


class LstmCell(Series):
    def model(self) -> nn.Module:
        return CellModel(self.variables, self.width)


class Translator(nn.Module):
    """A GRU reads the source, another writes the target with attention (Bahdanau et al., 2015)."""

    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.encoder, self.decoder = (nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.query, self.key, self.score = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states, last = self.encoder(self.embed(source))
        written, _ = self.decoder(self.embed(target), last)
        scores = self.score((self.query(written)[:, :, None] + self.key(states)[:, None]).tanh()).squeeze(-1)
        return self.head(torch.cat([written, scores.softmax(-1) @ states], -1))


class Seq2Seq(Tokens):
    def model(self) -> nn.Module:
        return Translator(self.width)

    def inputs(self, batch: Any) -> Any:
        return batch[1], batch[0]


class TemporalBlock(nn.Module):
    """Two causal convolutions with weight norm (Bai, Kolter and Koltun, TCN, 2018)."""

    def __init__(self, inputs: int, outputs: int, dilation: int):
        super().__init__()
        self.padding = 2 * dilation
        self.first = weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation))
        self.second = weight_norm(nn.Conv1d(outputs, outputs, 3, dilation=dilation))
        self.shortcut = nn.Conv1d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(F.pad(x, (self.padding, 0))))
        return F.relu(F.relu(self.second(F.pad(hidden, (self.padding, 0)))) + self.shortcut(x))


class Tcn(Series):
    def model(self) -> nn.Module:
        widths = [self.variables, self.width, self.width, self.width]
        blocks = (
            TemporalBlock(inputs, outputs, 2**index)
            for index, (inputs, outputs) in enumerate(pairwise(widths))
        )
        return nn.Sequential(*blocks, nn.Conv1d(self.width, self.variables, 1))

    def inputs(self, batch: Any) -> Tensor:
        return batch[0].mT

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.mT - batch[1]).square()


class ConvLstmCell(nn.Module):
    """An LSTM whose products are convolutions (Shi et al., 2015)."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.width, self.gates = width, nn.Conv2d(inputs + width, 4 * width, 3, padding=1)
        self.head = nn.Conv2d(width, inputs, 1)

    def forward(self, video: Tensor) -> Tensor:
        hidden = video.new_zeros(len(video), self.width, *video.shape[3:])
        memory, frames = hidden, []
        for frame in video.unbind(1):
            i, f, o, g = self.gates(torch.cat([frame, hidden], 1)).chunk(4, 1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * memory.tanh()
            frames.append(self.head(hidden))
        return torch.stack(frames, 1)


class ConvLstm(Synthetic):
    """Predict the next frames of a video."""

    def make(self, generator: Generator) -> Any:
        video = torch.randn(6, 1, 6, 6, generator=generator)
        return video[:-1], video[1:]

    def model(self) -> nn.Module:
        return ConvLstmCell(1, 8)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()


class SpeechCtc(Synthetic):
    """Convolutions and a GRU over frames, trained with CTC."""

    width: int = 16

    def make(self, generator: Generator) -> Any:
        frames = torch.randn(8, 4 * LENGTH, generator=generator)
        length = torch.randint(2, 6, (), generator=generator)
        return frames, torch.randint(1, CLASSES, (6,), generator=generator), length

    def model(self) -> nn.Module:
        return Listener(self.width)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        frames = torch.full((len(output),), output.shape[1])
        return F.ctc_loss(
            output.log_softmax(-1).transpose(0, 1), batch[1], frames, batch[2], reduction="none"
        )


class Listener(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv1d(8, width, 5, 2, 2)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.gru(F.relu(self.conv(frames)).mT)[0])


class HighwayLayer(nn.Module):
    """A gate chooses between the input and a function of it (Srivastava et al., 2015)."""

    def __init__(self, width: int):
        super().__init__()
        self.change, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return gate * F.relu(self.change(x)) + (1 - gate) * x


class CharCnn(Tokens):
    """Characters, convolutions of several sizes and highway layers, as in character-aware models."""

    width: int = 16

    def make(self, generator: Generator) -> Any:
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        return tokens, torch.randint(CLASSES, (), generator=generator)

    def model(self) -> nn.Module:
        return Characters(self.width)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class Characters(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, size) for size in (2, 3))
        self.highways = nn.Sequential(HighwayLayer(2 * width), HighwayLayer(2 * width))
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mT
        return self.head(self.highways(torch.cat([conv(x).amax(2) for conv in self.convs], 1)))
