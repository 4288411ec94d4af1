// The arguments of one call of a kernel. fp4graph/kernels/abi.py fills them in.

#pragma once

#include "blockwise.h"
#include "noise.h"
#include "rotation.h"

namespace {

struct Matrix {
    void* data;
    Strides strides;
};

struct Call {
    Matrix x;  // the input; `places` lists its columns
    Places places;
    Matrix y;  // the output
    u8* codes;  // the bytes of an operand, read or written: codes and scales
    void* scales;
    BlockwiseParts given;
    BlockRotation rotation;
    KeyParts draw;
    Shape shape;  // of y
    int threads;
};

}  // namespace
