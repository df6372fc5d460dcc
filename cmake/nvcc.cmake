# Sets CMAKE_CUDA_COMPILER to the nvcc of PyPI's wheels (gradcomm[cuda-build]), where CMake would find none.
if(DEFINED CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
  return()
endif()
find_program(GRADCOMM_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT GRADCOMM_NVCC)
  # The wheels share one namespace package, nvidia, which has a folder for each toolkit.
  set(search "import nvidia, pathlib\nfor folder in nvidia.__path__:\n"
             "    for nvcc in pathlib.Path(folder).glob('cu*/bin/nvcc'): print(nvcc)")
  string(CONCAT search ${search})
  execute_process(COMMAND "${Python_EXECUTABLE}" -c "${search}"
                  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  string(REGEX REPLACE "\n.*" "" found "${found}")
  set(GRADCOMM_NVCC "${found}" CACHE FILEPATH "nvcc" FORCE)
  if(found)
    # The wheels' libraries lie in lib; this nvcc looks in lib64.
    get_filename_component(toolkit "${found}/../.." ABSOLUTE)
    set(ENV{CUDAFLAGS} "$ENV{CUDAFLAGS} -L${toolkit}/lib")
  endif()
endif()
if(GRADCOMM_NVCC)
  set(CMAKE_CUDA_COMPILER "${GRADCOMM_NVCC}")
endif()
