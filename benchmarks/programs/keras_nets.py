# SPDX-License-Identifier: Apache-2.0
"""Networks of keras.applications, and of Keras's layers."""

import os
from collections.abc import Callable
from typing import Any

from benchmarks.programs.program import (
    Collection,
    Made,
    Program,
    both,
    gradient,
    normal,
)


def _keras(dtype: Any = "float32") -> Any:
    """Keras, as one finds it, but with jax, its weights seeded and of this dtype."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(str(dtype))
    return keras


def _stateless(net: Any, x: Any, learns: bool) -> Made:
    weights = [v.value for v in net.trainable_variables]
    others = [v.value for v in net.non_trainable_variables]

    def forward(weights: Any, others: Any, x: Any) -> Any:
        return net.stateless_call(weights, others, x, training=learns)[0]

    return gradient(forward) if learns else forward, (weights, others, x)


def _application(
    name: str, rows: int, size: int, learns: bool = False
) -> Callable[..., Made]:
    def make(dtype: Any) -> Made:
        applications = _keras(dtype).applications
        net = getattr(applications, name)(
            weights=None, input_shape=(size, size, 3), classifier_activation=None
        )
        return _stateless(net, normal(rows, size, size, 3, dtype=dtype), learns)

    return make


def _conv_lstm(dtype: Any) -> Made:
    """The next frame of a film, learnt."""
    layers = _keras(dtype).layers
    shape = 4, 24, 24, 1
    x = inputs = layers.Input(shape)
    for _ in range(2):
        x = layers.ConvLSTM2D(32, 3, padding="same", return_sequences=True)(x)
        x = layers.BatchNormalization()(x)
    x = layers.Conv3D(1, 3, padding="same", activation="sigmoid")(x)
    net = _keras(dtype).Model(inputs, x)
    return _stateless(net, normal(2, *shape, dtype=dtype), True)


def _volumes(dtype: Any) -> Made:
    """A classifier of scans, as in Keras's examples."""
    keras = _keras(dtype)
    layers = keras.layers
    shape = 32, 32, 32, 1
    net = keras.Sequential([layers.Input(shape)])
    for channels in (32, 64, 64):
        net.add(layers.Conv3D(channels, 3, activation="relu", padding="same"))
        net.add(layers.MaxPool3D(2))
        net.add(layers.BatchNormalization())
    net.add(layers.GlobalAveragePooling3D())
    net.add(layers.Dense(1))
    return _stateless(net, normal(1, *shape, dtype=dtype), False)


COLLECTION = Collection(
    ("keras",),
    (
        Program("ResNet50V2, 1x160x160", _application("ResNet50V2", 1, 160)),
        Program(
            "MobileNetV2, gradient, 4x96x96", _application("MobileNetV2", 4, 96, True)
        ),
        Program("ResNet50, gradient, 2x96x96", _application("ResNet50", 2, 96, True)),
        Program("InceptionV3, 1x224x224", _application("InceptionV3", 1, 224)),
        Program("DenseNet121, 1x160x160", _application("DenseNet121", 1, 160)),
        Program("NASNetMobile, 1x224x224", _application("NASNetMobile", 1, 224)),
        Program("VGG16, 1x128x128", _application("VGG16", 1, 128)),
        Program("Xception, 1x224x224", _application("Xception", 1, 224)),
        *both("ConvNeXtTiny, 1x128x128", _application("ConvNeXtTiny", 1, 128)),
        Program(
            "EfficientNetB0, 1x224x224",
            _application("EfficientNetB0", 1, 224),
            "bfloat16",
        ),
        Program(
            "MobileNetV3Small, 1x128x128",
            _application("MobileNetV3Small", 1, 128),
            "bfloat16",
        ),
        Program("ConvLSTM2D, gradient, 4 frames", _conv_lstm),
        Program("Conv3D, 32x32x32", _volumes),
    ),
)
