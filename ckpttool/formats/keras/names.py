"""The classes that Keras 2 and 3 bring along, by the module that a config names them in.

Source: the public modules of keras 3.15 and tf_keras 2.21, listed by introspection.
"""

from __future__ import annotations

_LAYERS = """
AbstractRNNCell Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D
AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
AdditiveAttention AlphaDropout Attention AugMix AutoContrast Average AveragePooling1D AveragePooling2D
AveragePooling3D AvgPool1D AvgPool2D AvgPool3D BatchNormalization Bidirectional CategoryEncoding CenterCrop
Concatenate ContrastLimitedAdaptiveHistogramEqualization Conv1D Conv1DTranspose Conv2D Conv2DTranspose
Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D Convolution1D Convolution1DTranspose Convolution2D
Convolution2DTranspose Convolution3D Convolution3DTranspose Cropping1D Cropping2D Cropping3D CutMix Dense
DenseFeatures DepthwiseConv1D DepthwiseConv2D Discretization Dot Dropout ELU EinsumDense Embedding
Equalization Flatten GRU GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D
GlobalAveragePooling3D GlobalAvgPool1D GlobalAvgPool2D GlobalAvgPool3D GlobalMaxPool1D GlobalMaxPool2D
GlobalMaxPool3D GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GroupNormalization
GroupQueryAttention GroupedQueryAttention HashedCrossing Hashing Identity InputLayer InputSpec IntegerLookup
LSTM LSTMCell Layer
LayerNormalization LeakyReLU LocallyConnected1D LocallyConnected2D Masking MaxNumBoundingBoxes MaxPool1D
MaxPool2D MaxPool3D MaxPooling1D MaxPooling2D MaxPooling3D Maximum MelSpectrogram Minimum MixUp
MultiHeadAttention Multiply Normalization PReLU Permute Pipeline RMSNormalization RNN RandAugment
RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop RandomElasticTransform
RandomErasing RandomFlip RandomFourierFeatures RandomGaussianBlur RandomGrayscale RandomHeight RandomHue
RandomInvert RandomPerspective RandomPosterization RandomRotation RandomSaturation RandomSharpness
RandomShear RandomTranslation RandomWidth RandomZoom ReLU RepeatVector Rescaling Reshape Resizing
ReversibleEmbedding STFTSpectrogram SeparableConv1D SeparableConv2D SeparableConvolution1D
SeparableConvolution2D SimpleRNN SimpleRNNCell Softmax Solarization SpatialDropout1D SpatialDropout2D
SpatialDropout3D SpectralNormalization StackedRNNCells StringLookup Subtract TextVectorization
ThresholdedReLU TimeDistributed UnitNormalization UpSampling1D UpSampling2D UpSampling3D Wrapper
ZeroPadding1D ZeroPadding2D ZeroPadding3D
"""

_OTHERS = """
AUC AWQConfig AWQDTypePolicy AbsMaxQuantizer Accuracy Adadelta Adafactor Adagrad Adam AdamW Adamax
BinaryAccuracy BinaryCrossentropy BinaryFocalCrossentropy BinaryIoU CTC CategoricalAccuracy
CategoricalCrossentropy CategoricalFocalCrossentropy CategoricalGeneralizedCrossEntropy CategoricalHinge
Circle ConcordanceCorrelation Constant Constraint CosineDecay CosineDecayRestarts CosineSimilarity
DTypePolicy DTypePolicyMap Dice ExponentialDecay F1Score FBetaScore FalseNegatives FalsePositives
Float8QuantizationConfig FloatDTypePolicy Ftrl Functional GPTQConfig GPTQDTypePolicy GlorotNormal
GlorotUniform HeNormal HeUniform Hinge Huber Identity IdentityInitializer Initializer Int4DTypePolicy
Int4QuantizationConfig Int8QuantizationConfig InverseTimeDecay IoU KLDivergence KerasTensor L1 L1L2 L2 Lamb
Layer LearningRateSchedule LecunNormal LecunUniform Lion LogCosh LogCoshError Loss LossScaleOptimizer
LossScaleOptimizerV3
MaxNorm Mean MeanAbsoluteError MeanAbsolutePercentageError MeanIoU MeanMetricWrapper MeanRelativeError
MeanSquaredError MeanSquaredLogarithmicError MeanTensor Metric MinMaxNorm Model MultiOptimizer Muon Nadam
NonNeg OneHotIoU OneHotMeanIoU Ones Operation Optimizer OptimizerMap Orthogonal OrthogonalInitializer
OrthogonalRegularizer PearsonCorrelation PiecewiseConstantDecay Poisson Policy PolynomialDecay Precision
PrecisionAtRecall QuantizationConfig QuantizedDTypePolicy QuantizedFloat8DTypePolicy Quantizer R2Score
RMSprop RadialConstraint RandomNormal RandomUniform Recall RecallAtPrecision Reduction Regularizer
RootMeanSquaredError SGD STFT STFTInitializer ScheduleFreeAdamW SeedGenerator SensitivityAtSpecificity
Sequential SparseCategoricalAccuracy SparseCategoricalCrossentropy SparseTopKCategoricalAccuracy
SpecificityAtSensitivity SquaredHinge Sum TopKCategoricalAccuracy TrueNegatives TruePositives
TruncatedNormal Tversky UnitNorm Variable VarianceScaling Zeros constant glorot_normal glorot_uniform
he_normal he_uniform identity l1 l1_l2 l2 lecun_normal lecun_uniform max_norm min_max_norm non_neg ones
orthogonal orthogonal_regularizer radial_constraint random_normal random_uniform stft truncated_normal
unit_norm variance_scaling zeros
"""

_FUNCTIONS = """
binary_accuracy binary_crossentropy binary_focal_crossentropy categorical_accuracy categorical_crossentropy
categorical_focal_crossentropy categorical_generalized_cross_entropy categorical_hinge celu circle
concordance_correlation cosine_similarity ctc dice elu exponential gelu glu hard_shrink hard_sigmoid
hard_silu hard_tanh hinge huber kl_divergence l1_l2 leaky_relu linear log_cosh log_sigmoid log_softmax
mean_absolute_error mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error mish
pearson_correlation poisson relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign
sparse_categorical_accuracy sparse_categorical_crossentropy sparse_plus sparse_sigmoid
sparse_top_k_categorical_accuracy sparsemax squared_hinge squareplus swish tanh tanh_shrink threshold
top_k_categorical_accuracy tversky
"""

_OPERATIONS = """
Abs Absolute AdaptiveAveragePool AdaptiveMaxPool Add AffineTransform All AllClose Amax Amin Angle Any Append
Arange Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh Argmax Argmin Argpartition Argsort Array
ArraySplit Average AveragePool BatchNorm BinaryCrossentropy Bincount BitwiseAnd BitwiseInvert
BitwiseLeftShift BitwiseNot BitwiseOr BitwiseRightShift BitwiseXor BroadcastTo CDist CTCDecode CTCLoss Cast
CategoricalCrossentropy Cbrt Ceil Celu Cholesky CholeskyInverse Clip Concatenate Conj Conjugate Conv
ConvTranspose ConvertToTensor Copy Corrcoef Correlate Cos Cosh CountNonzero CropImages Cross Cumprod Cumsum
Deg2rad DepthToSpace DepthwiseConv Det Diag Diagflat Diagonal Diff Digitize Divide DivideNoNan Dot
DotProductAttention Dsplit Dstack Eig Eigh Einsum ElasticTransform Elu EmptyLike Equal Erf Erfc Erfinv Exp
Exp2 ExpandDims Expm1 ExtractPatches ExtractSequences FFT FFT2 Fabs Flip Fliplr Flipud Floor FloorDivide
Fmax Fmin Fmod Fold Full FullLike Function GaussianBlur Gcd Gelu Geomspace GetItem Glu Greater GreaterEqual
HSVToRGB HardShrink HardSigmoid HardSilu HardTanh Heaviside Histogram Hsplit Hstack Hypot I0 IFFT2 IRFFT
ISTFT Imag InTopK Inner Inv IsIn Isclose Isfinite Isinf Isnan Isneginf Isposinf Isreal JVP Kron LayerNorm
Lcm Ldexp LeakyRelu LeftShift Less LessEqual Linspace Log Log10 Log1p Log2 LogSigmoid LogSoftmax Logaddexp
Logaddexp2 Logdet LogicalAnd LogicalNot LogicalOr LogicalXor Logspace Logsumexp Lstsq LuFactor
MapCoordinates Matmul MatrixRank Max MaxPool Maximum Mean Median Meshgrid Min Minimum Mod Moments Moveaxis
MultiHot Multiply NanToNum Nanargmax Nanargmin Nancumprod Nancumsum Nanmax Nanmean Nanmedian Nanmin
Nanpercentile Nanprod Nanquantile Nanstd Nansum Nanvar Ndim Negative Nextafter Nonzero Norm Normalize
NotEqual OneHot OnesLike Outer PSNR Pad PadImages Percentile PerspectiveTransform Pinv Polar Power Prod Ptp
Qr Quantile RFFT RGBToGrayscale RGBToHSV RMSNorm Rad2deg Ravel Real Rearrange Reciprocal Relu Relu6 Repeat
Reshape Resize RightShift Roll Rot90 Round Rsqrt SSIM STFT SVD SaturateCast ScaleAndTranslate Scatter
ScatterUpdate SearchSorted SegmentMax SegmentMin SegmentProd SegmentReduction SegmentSum Select Selu
SeparableConv Sigmoid Sign Signbit Silu Sin Sinc Sinh Size Slice SliceUpdate Slogdet SobelEdges SoftShrink
Softmax Softplus Softsign Solve SolveTriangular Sort SpaceToDepth SparseCategoricalCrossentropy SparsePlus
SparseSigmoid Sparsemax Split Sqrt Square Squareplus Squeeze Stack Std StopGradient Subtract Sum Swapaxes
Take TakeAlongAxis Tan Tanh TanhShrink Tensordot Threshold Tile TopK Trace Transpose Trapezoid Tril Triu
TrueDivide Trunc Unfold Unique UnravelIndex Unstack Vander Var Vdot View ViewAsComplex ViewAsReal Vsplit
Vstack Where ZerosLike
"""

OPERATIONS = frozenset(_OPERATIONS.split())
"""What ``keras.ops`` does to a symbolic tensor, as a model names it; what takes a function is left out."""

FUNCTIONS = frozenset(_FUNCTIONS.split())
"""Activations, losses and metrics that are functions, and are looked up by name in Keras alone."""

TENSORFLOW_CALLS = frozenset({"TFOpLambda", "SlicingOpLambda"})
"""Layers of Keras 2 that call a function of TensorFlow by its name."""

HARMLESS_CALLS = ("__operators__.", "math.", "nn.", "linalg.", "image.resize", "debugging.assert_")
"""How the names of those that only compute begin."""

HARMLESS_FUNCTIONS = frozenset(
    {
        "boolean_mask",
        "broadcast_to",
        "cast",
        "clip_by_value",
        "compat.v1.shape",
        "compat.v1.transpose",
        "concat",
        "convert_to_tensor",
        "expand_dims",
        "eye",
        "fill",
        "gather",
        "identity",
        "meshgrid",
        "one_hot",
        "ones_like",
        "pad",
        "range",
        "repeat",
        "reshape",
        "reverse",
        "shape",
        "slice",
        "split",
        "squeeze",
        "stack",
        "stop_gradient",
        "strided_slice",
        "tile",
        "transpose",
        "unstack",
        "where",
        "zeros_like",
    }
)

CLASSES = frozenset(_LAYERS.split()) | frozenset(_OTHERS.split())
"""Classes that do nothing but compute when a config makes them."""

DATA = frozenset(
    {
        "__tuple__",
        "__tensor__",
        "__numpy__",
        "__bytes__",
        "__ellipsis__",
        "__slice__",
        "__complex__",
        "__keras_tensor__",
        "__dtype__",
        "__typespec__",
        "__set__",
        "TensorShape",
        "Tensor",
    }
)
"""What stands for plain data in a config, as if it were a class."""

MODULES = frozenset(
    {
        "activations",
        "constraints",
        "dtype_policies",
        "engine",
        "initializers",
        "layers",
        "legacy",
        "losses",
        "metrics",
        "mixed_precision",
        "models",
        "ops",
        "optimizer",
        "optimizers",
        "quantizers",
        "random",
        "regularizers",
    }
)
"""The parts of Keras whose classes a config may name; others hold functions that read files and load code."""

RUNNING = {
    "TorchModuleWrapper": "unpickles a PyTorch module",
    "TFSMLayer": "loads a SavedModel from a path",
    "JaxLayer": "runs a function of its own",
    "FlaxLayer": "runs a function of its own",
}
"""Layers of Keras that run more than Keras."""

VOCABULARIES = frozenset({"StringLookup", "IntegerLookup", "IndexLookup", "TextVectorization"})
"""Layers whose ``vocabulary`` may be the name of a file that is read."""

_LAYERS_WITHOUT = """
Activation Add AlphaDropout Average AveragePooling1D AveragePooling2D AveragePooling3D Concatenate
Cropping1D Cropping2D Cropping3D Dot Dropout ELU Flatten GaussianDropout GaussianNoise
GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D
GlobalMaxPooling2D GlobalMaxPooling3D Identity InputLayer LeakyReLU Masking MaxPooling1D MaxPooling2D
MaxPooling3D Maximum Minimum Multiply Permute ReLU RepeatVector Rescaling Reshape Softmax
SpatialDropout1D SpatialDropout2D SpatialDropout3D Subtract UnitNormalization UpSampling1D UpSampling2D
UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
"""

WITHOUT = frozenset(_LAYERS_WITHOUT.split())
"""Layers without weights, that other layers and models may contain."""
